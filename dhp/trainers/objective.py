"""The objective of a step: Σ token losses / N_global, and its only scaling.

Where the model asks for a load-balancing loss of experts, each sample's own, times its coefficient, joins the objective
by the sample's share of the target tokens: Σ (token losses + targets × coefficient × balance) / N_global.

N_global is the number of target tokens of the global batch. Every other file sums: over micro-batches, data,
sequence and tensor ranks, and over stages. Labels were shifted when rows were made (`dhp.batching.collate`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from dhp.base.geometry import IGNORED
from dhp.base.logits import LogitRule
from dhp.parallel.tensor.loss import PLAIN, judge_tokens, token_loss_sum


class Judged(NamedTuple):
    """The result of some rows: their share of the objective, a scalar, and for each target whether it has the highest
    logit, bool [targets]."""

    share: Tensor
    right: Tensor


class Targets(NamedTuple):
    """The tokens to predict: at which of the flattened rows × tokens, and which token. Both int64 [targets]."""

    positions: Tensor
    tokens: Tensor


def find_targets(targets: Tensor) -> Targets:
    """The entries of `targets` [rows, tokens], what each token should predict, that are not -100. On the host, where
    looking for them holds nothing up."""
    flat = targets.flatten()
    positions = (flat != IGNORED).nonzero()[:, 0]
    return Targets(positions, flat[positions])


def find_samples(targets: Tensor, lengths: Sequence[int]) -> tuple[list[range], Tensor]:
    """For samples of so many tokens, in one row or each in its own: their places among the flattened rows × tokens, and
    how many targets each has, int64 [samples]. targets: [rows, tokens], on the host."""
    rows, width = targets.shape
    starts = [0, *accumulate(lengths)][:-1] if rows == 1 else [row * width for row in range(rows)]
    spans = [range(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    wanted = targets.flatten() != IGNORED
    return spans, torch.stack([wanted[span.start : span.stop].sum() for span in spans])


def share_of_objective(
    head: nn.Linear, hidden: Tensor, targets: Targets, target_tokens: int, rule: LogitRule = PLAIN
) -> Tensor:
    """These rows' share of the step's objective, a scalar. hidden: [rows, tokens, hidden]; rule: of the model's logits.

    The head runs on the positions that have a target only: image and prompt tokens never cost a row of logits.
    """
    states = hidden.flatten(0, 1)
    if not len(targets.tokens):
        # One row keeps the head, its collectives and every parameter in the graph.
        return token_loss_sum(head, states[:1], targets.tokens.new_zeros(1), rule=rule, factor=0.0)
    chosen = states.index_select(0, targets.positions)
    return token_loss_sum(head, chosen, targets.tokens, rule=rule, factor=1 / max(target_tokens, 1))


def judge_rows(head: nn.Linear, hidden: Tensor, targets: Targets, target_tokens: int, rule: LogitRule) -> Judged:
    """The same without gradients, and which targets have the highest logit."""
    states = hidden.flatten(0, 1)
    positions, tokens = targets
    if not len(tokens):  # the head's ranks take part all the same
        judge_tokens(head, states[:1], tokens.new_zeros(1), rule=rule)
        return Judged(states.new_zeros(()), tokens.new_zeros(0, dtype=torch.bool))
    loss, right = judge_tokens(head, states.index_select(0, positions), tokens, rule=rule)
    return Judged(loss / max(target_tokens, 1), right)


def share_of_balance(losses: Tensor, targets: Tensor, coefficient: float, target_tokens: int) -> Tensor:
    """The samples' share of the step's objective, a scalar. losses: of balance, and targets: how many, of each sample;
    [samples]."""
    return coefficient * (losses * targets.to(losses)).sum() / max(target_tokens, 1)
