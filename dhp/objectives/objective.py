"""What a step minimizes, as a record of its data and its mathematics.

The objective of a step is Σ of its samples' losses / N, where N is the sum of all samples' weights over the whole
global batch. This division is the only scaling; every other file sums: over micro-batches, over data, sequence and
tensor ranks, and over stages. So any objective whose loss is a sum over tokens is exact in every layout.

Where the model asks for a load-balancing loss of experts, each sample's own, times its coefficient, joins the objective
by the sample's share of N: Σ (losses + weight × coefficient × balance) / N.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from torch import Tensor, nn

from dhp.core.batch import LogitRule
from dhp.data.sample.sample import Sample
from dhp.parallel.tensor.loss import PLAIN

Chosen = tuple[Tensor, ...]


class Head(NamedTuple):
    """The decoder's last matrix, whole or this tensor rank's slice of it, and what the model makes of its output.

    losses: gets the loss of each token that `Objective.counted` names, in their order, in one tensor or several; None:
    nobody asks for them.
    """

    matrix: nn.Linear
    rule: LogitRule = PLAIN
    losses: list[Tensor] | None = None


class Judged(NamedTuple):
    """Of some rows: their share of the objective, a scalar; and for each of what evaluation counts whether it is right,
    bool [counted]."""

    share: Tensor
    right: Tensor


class Objective(ABC):
    """One objective. It is made once in the dataset actor, for samples, and once in each rank that has the head."""

    @property
    @abstractmethod
    def columns(self) -> Mapping[str, int | float]:
        """What it needs of every token beside the model's arguments, by name, and what padding has there: an integer
        (int64) or a float (float64). Names must differ from the model's arguments."""

    @abstractmethod
    def values(self, sample: Sample) -> dict[str, np.ndarray]:
        """The columns of one sample, [L] each. They are packed, padded and cut as its tokens are: what a token's loss
        needs of its neighbours is to be in its own column."""

    @abstractmethod
    def weight(self, sample: Sample) -> float:
        """The sample's weight in N; not negative. A step whose samples all have none trains nothing."""

    @abstractmethod
    def choose(self, columns: Mapping[str, Tensor]) -> Chosen:
        """From the columns [rows, tokens] of a rank's tokens, on the host, what `share` and `judge` need on the
        device."""

    def counted(self, columns: Mapping[str, Tensor]) -> Tensor | None:
        """Which tokens a sample's loss is the mean of, bool [rows, tokens], on the host: those whose losses `share`
        adds to `Head.losses`. None: a loss of a single sample has no meaning here, and `share` adds none."""
        return None

    @abstractmethod
    def share(self, head: Head, states: Tensor, chosen: Chosen, total: float) -> Tensor:
        """These rows' losses / total (N), a scalar whose gradient must be 1. states: [rows × tokens, hidden]. Also for
        rows without any loss: the head, its collectives and every parameter take part."""

    @abstractmethod
    def judge(self, head: Head, states: Tensor, chosen: Chosen, total: float) -> Judged:
        """The same under no_grad, and what evaluation counts."""


def share_of_balance(losses: Tensor, weights: Tensor, coefficient: float, total: float) -> Tensor:
    """The samples' share of the step's objective, a scalar. losses: of balance, and weights: in N, of each sample;
    [samples]."""
    return coefficient * (losses * weights.to(losses)).sum() / (total or 1)
