"""The objective of a step: Σ token losses / N_global, and its only scaling.

N_global is the number of target tokens of the global batch. Every other file sums: over micro-batches, data,
sequence and tensor ranks, and over the parts.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from dhp.parallel.tensor.loss import token_loss_sum

IGNORED = -100


class Targets(NamedTuple):
    """What is to be predicted: at which of the flattened rows × tokens, and which token. Both int64 [targets]."""

    positions: Tensor
    tokens: Tensor


def find_targets(labels: Tensor) -> Targets:
    """The targets of `labels` [rows, tokens], which are not shifted and -100 where there is none. On the host, where
    looking for them holds nothing up."""
    rows, places = (labels[:, 1:] != IGNORED).nonzero(as_tuple=True)
    return Targets(rows * labels.shape[1] + places, labels[rows, places + 1])


def share_of_objective(head: nn.Linear, hidden: Tensor, targets: Targets, target_tokens: int) -> Tensor:
    """These rows' share of the step's objective, a scalar. hidden: [rows, tokens, hidden].

    The head runs on the positions that have a target only: image and prompt tokens never cost a row of logits.
    """
    states = hidden.flatten(0, 1)
    if not len(targets.tokens):
        # One row keeps the head, its collectives and every parameter in the graph.
        return token_loss_sum(head, states[:1], targets.tokens.new_zeros(1)) * 0.0
    return token_loss_sum(head, states.index_select(0, targets.positions), targets.tokens) / max(target_tokens, 1)
