"""Objectives that are any function of the log-probabilities of target tokens.

It is computed in two passes over the head's rows: one without gradients, for the log-probabilities; then the function,
and its slope for each token; and one that weighs each token's loss by its slope. So ranks may hold any tokens of a
sample: sums over a sample cross ranks, and nothing else does. Of entropies of the same distributions as well."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from dhp.core.batch import IGNORED
from dhp.data.sample.sample import Sample
from dhp.objectives.objective import Chosen, CrossEntropy, Head, Judged
from dhp.parallel.tensor.loss import judge_tokens, token_loss_sum

WEIGHTS = "weights"  # the column that every loss of tokens has; 1 where a sample has none
ENTROPIES = "entropies"  # the argument of a loss of tokens that gets them


class SummedCosts(NamedTuple):
    """What rows cost. total: a scalar that `sharing` ranks know alike, or this one alone. right: see `Judged`."""

    total: Tensor
    right: Tensor
    sharing: int = 1


class LogProbabilityObjective(CrossEntropy):
    """A subclass says what log-probabilities cost.

    temperature: by which logits are divided. uses_entropies: `sum_costs` gets, behind the others, the entropy of the
    distribution that each target is of, [targets], and evaluation reports it."""

    temperature = 1.0
    uses_entropies = False

    @abstractmethod
    def sum_costs(self, logps: Tensor, head: Head, chosen: Chosen) -> SummedCosts:
        """logps: of the targets here, float32 or float64 [targets]."""

    def share(self, head: Head, states: Tensor, chosen: Chosen, total: float) -> Tensor:
        """Of a sum that several ranks know each has an equal part."""
        rows, tokens, empty = _targets(states, chosen)
        head = self._cooled(head)
        found = [one.requires_grad_() for one in self._score(head, rows, tokens, empty)]
        costs = self.sum_costs(found[0], head, chosen, *found[1:])
        value = costs.total / (total or 1)
        slopes = torch.autograd.grad(value, found, allow_unused=True) if value.requires_grad else (None, None)
        factor: Tensor | float = 0.0 if empty or slopes[0] is None else -slopes[0]
        spread = None if empty or len(found) == 1 else slopes[1]
        if head.losses is not None and not empty:
            head.losses.append(-found[0].detach())
        weighed = token_loss_sum(head.matrix, rows, tokens, rule=head.rule, factor=factor, entropy_factor=spread)
        return weighed + (value.detach() / costs.sharing - weighed.detach())

    def judge(self, head: Head, states: Tensor, chosen: Chosen, total: float) -> Judged:
        rows, tokens, empty = _targets(states, chosen)
        head = self._cooled(head)
        logps, *entropies = self._score(head, rows, tokens, empty)
        costs = self.sum_costs(logps, head, chosen, *entropies)
        reported = torch.stack([-logps, *entropies], 1) if entropies else -logps
        return Judged(costs.total / (total or 1) / costs.sharing, costs.right, reported)

    def _cooled(self, head: Head) -> Head:
        return head._replace(rule=replace(head.rule, temperature=self.temperature))

    def _score(self, head: Head, rows: Tensor, tokens: Tensor, empty: bool) -> list[Tensor]:
        """Log-probabilities of the targets, and entropies where they are used."""
        entropies: list[Tensor] | None = [] if self.uses_entropies else None
        losses, _ = judge_tokens(head.matrix, rows, tokens, rule=head.rule, entropies=entropies)
        found = [-losses] if entropies is None else [-losses, torch.cat(entropies)]
        return [one[:0] for one in found] if empty else found


def _targets(states: Tensor, chosen: Chosen) -> tuple[Tensor, Tensor, bool]:
    """States and tokens of the targets; of a rank without any those of one row, which is not counted."""
    positions, tokens, *_ = chosen
    if not len(tokens):
        return states[:1], tokens.new_zeros(1), True
    return states.index_select(0, positions), tokens, False


Columns = Mapping[str, Tensor]  # of the target tokens, [targets] each
# Of their log-probabilities, [targets], such columns, `entropies`, [targets], if it has an argument of that name, and
# settings: a scalar, a sum.
TokenCost = Callable[..., Tensor]


class TokenLoss(LogProbabilityObjective):
    """A sum over target tokens, of each alone: ranks call `cost` with whichever tokens they hold. Columns are those of
    samples (`dhp.data.sample.sample.Sample.columns`); N is the sum of the targets' weights."""

    def __init__(self, cost: TokenCost, names: Sequence[str], settings: Mapping[str, float]):
        super().__init__()
        self._cost, self._names, self._settings = cost, tuple(dict.fromkeys((WEIGHTS, *names))), dict(settings)
        self.columns = {"targets": IGNORED, **{f"column {name}": 0.0 for name in self._names}}
        self.uses_entropies = ENTROPIES in signature(cost).parameters

    def values(self, sample: Sample) -> dict[str, np.ndarray]:
        """At each token, what belongs to the one behind it: its target."""
        shifted = {f"column {name}": np.append(sample.columns[name][1:], 0.0) for name in self._names}
        return super().values(sample) | shifted

    def weight(self, sample: Sample) -> float:
        return float(sample.columns[WEIGHTS][1:][sample.labels[1:] != IGNORED].sum())

    def choose(self, columns: Mapping[str, Tensor]) -> Chosen:
        positions, tokens = super().choose(columns)
        return positions, tokens, *(columns[f"column {name}"].flatten()[positions] for name in self._names)

    def sum_costs(self, logps: Tensor, head: Head, chosen: Chosen, *entropies: Tensor) -> SummedCosts:
        columns = {name: column.to(logps) for name, column in zip(self._names, chosen[2:], strict=True)}
        total = self._cost(logps, columns, **self._settings, **dict(zip((ENTROPIES,), entropies)))
        if total.ndim:
            raise ValueError(f"the loss of {len(logps)} tokens is a sum, a scalar, and it has the shape {total.shape}")
        if logps.requires_grad and len(logps) and not total.requires_grad:
            raise ValueError(
                "the loss has no gradient: it is of detached log-probabilities, or of none. Nothing is learned"
            )
        return SummedCosts(total, logps.new_zeros(0, dtype=torch.bool))


def cross_entropy(logps: Tensor, columns: Columns) -> Tensor:
    """Σ −weight × logp."""
    return -(columns[WEIGHTS] * logps).sum()


def linear(logps: Tensor, columns: Columns, entropies: Tensor) -> Tensor:
    """Σ −weight × logp − entropy_weight × entropy: any loss of both by its slopes. Without `entropy_weights`, of
    log-probabilities alone."""
    weights = columns.get("entropy_weights", torch.zeros_like(logps))
    return -(columns[WEIGHTS] * logps + weights * entropies).sum()


def importance_sampling(logps: Tensor, columns: Columns) -> Tensor:
    """Σ −weight × advantage × p / p of the model that sampled: the policy gradient, from others' samples."""
    ratios = (logps - columns["old_logps"]).exp()
    return -(columns[WEIGHTS] * columns["advantages"] * ratios).sum()


def ppo(logps: Tensor, columns: Columns, clip_low: float = 0.2, clip_high: float = 0.2) -> Tensor:
    """Proximal policy optimization (Schulman et al. 2017, equation 7), both bounds apart (Yu et al. 2025, "DAPO")."""
    ratios, advantages = (logps - columns["old_logps"]).exp(), columns["advantages"]
    clipped = ratios.clamp(1 - clip_low, 1 + clip_high)
    return -(columns[WEIGHTS] * torch.minimum(ratios * advantages, clipped * advantages)).sum()
