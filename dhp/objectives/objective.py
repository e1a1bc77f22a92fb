"""Objectives by name: data and mathematics of what is minimized."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dhp.config.training import PreferenceConfig
from dhp.core.batch import IGNORED, LogitRule
from dhp.data.sample.sample import Sample
from dhp.parallel.comm import sum_in_place
from dhp.parallel.tensor.loss import PLAIN, judge_tokens, token_loss_sum

Chosen = tuple[Tensor, ...]


@dataclass(frozen=True)
class MarkedSamples:
    """The samples of some rows, of which this rank has some tokens.

    numbers: of each target token here the number of its sample, int64 [targets]. marks: of each sample
    (`dhp.core.preferences.Mark`), float64 [samples, 3]. rows: the ranks that share the rows; replicas: those that have
    others of the micro-batch; None: there are none."""

    numbers: Tensor
    marks: Tensor
    rows: dist.ProcessGroup | None = None
    replicas: dist.ProcessGroup | None = None

    def sum(self, values: Tensor) -> Tensor:
        """Over the targets of each sample, on all ranks, [samples]. values: of those here, [targets]. Gradients go to
        these: each rank knows what a sum is for."""
        own = values.new_zeros(len(self.marks)).index_add(0, self.numbers, values)
        if self.rows is None:
            return own
        return own + (sum_in_place(own.detach().clone(), self.rows) - own.detach())

    def pairs(self, column: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """A column of the marks, of both sides of each preference."""
        first, second = self.marks[:, column].to(like.dtype).view(-1, 2).unbind(1)
        return first, second

    @property
    def sharing(self) -> int:
        """Ranks that share the rows."""
        return 1 if self.rows is None else dist.get_world_size(self.rows)

    @property
    def first(self) -> bool:
        """Whether this is the first of them."""
        return self.rows is None or dist.get_rank(self.rows) == 0


class Head(NamedTuple):
    """The decoder's last matrix, whole or this tensor rank's slice of it, and what the model makes of its output.

    losses: gets the loss of each token that `Objective.counted` names, in their order, in one tensor or several; None:
    nobody asks for them. samples: of the rows, where they are preferences."""

    matrix: nn.Linear
    rule: LogitRule = PLAIN
    losses: list[Tensor] | None = None
    samples: MarkedSamples | None = None


class Judged(NamedTuple):
    """Of some rows: their share of the objective, a scalar; and for each of what evaluation counts whether it is right,
    bool [counted]; of what `Objective.counted` names, in their order, where it names any. losses: of these, where
    others are counted."""

    share: Tensor
    right: Tensor
    losses: Tensor | None = None


class Objective(ABC):
    """One objective. It is made once in the dataset actor, for samples, and once in each rank that has the head.

    compares: of preferences what their rows have, PAIRS or SINGLES of `dhp.core.preferences`; `Head.samples` has these.
    refers: whether they have a reference."""

    compares: ClassVar[str] = ""
    refers: ClassVar[bool] = False

    def __init__(self, settings: PreferenceConfig | None = None):
        self.settings = settings or PreferenceConfig()

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


class CrossEntropy(Objective):
    """targets: for each token the one that follows it in its sample, -100 where nothing is to be predicted."""

    columns: Mapping[str, int | float] = MappingProxyType({"targets": IGNORED})

    def values(self, sample: Sample) -> dict[str, np.ndarray]:
        return {"targets": next_labels(sample)}

    def weight(self, sample: Sample) -> float:
        return sample.target_tokens

    def choose(self, columns: Mapping[str, Tensor]) -> Chosen:
        return find_targets(columns["targets"])

    def counted(self, columns: Mapping[str, Tensor]) -> Tensor | None:
        return columns["targets"] != IGNORED

    def share(self, head: Head, states: Tensor, chosen: Chosen, total: float) -> Tensor:
        """The head runs on the positions that have a target only: image and prompt tokens never cost a row of
        logits."""
        positions, tokens = chosen
        if not len(tokens):  # one row keeps the head, its collectives and every parameter in the graph
            return token_loss_sum(head.matrix, states[:1], tokens.new_zeros(1), rule=head.rule, factor=0.0)
        rows, factor = states.index_select(0, positions), 1 / (total or 1)
        return token_loss_sum(head.matrix, rows, tokens, rule=head.rule, factor=factor, losses=head.losses)

    def judge(self, head: Head, states: Tensor, chosen: Chosen, total: float) -> Judged:
        """Counted are targets; right is one that has the highest logit."""
        positions, tokens = chosen
        if not len(tokens):  # the head's ranks take part all the same
            judge_tokens(head.matrix, states[:1], tokens.new_zeros(1), rule=head.rule)
            return Judged(states.new_zeros(()), tokens.new_zeros(0, dtype=torch.bool))
        losses, right = judge_tokens(head.matrix, states.index_select(0, positions), tokens, rule=head.rule)
        return Judged(losses.sum() / (total or 1), right)


def next_labels(sample: Sample) -> np.ndarray:
    """For each token of a sample the label of the one behind it, int64 [L]; IGNORED for the last."""
    return np.append(sample.labels[1:], IGNORED).astype(np.int64)


def find_targets(targets: Tensor) -> tuple[Tensor, Tensor]:
    """Of `targets` [rows, tokens] those that are not IGNORED: at which of the flattened rows × tokens, and which token;
    both int64 [targets]. On the host, where looking for them holds nothing up."""
    flat = targets.flatten()
    positions = (flat != IGNORED).nonzero()[:, 0]
    return positions, flat[positions]
