"""Quick figures of a part's layouts: seconds of a step and bytes of a device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from dhp.config.parts import resolved
from dhp.planner.units import Numbers
from dhp.trainer.forecast.layouts import PartLayout


@dataclass(frozen=True)
class Rows:
    """A step's division: samples of a row, replicas of the decoder, and micro-batches."""

    micro_batch_size: int
    replicas: int
    micro_batches: int


@dataclass(frozen=True)
class Score:
    """One layout of a part with one choice of recompute.

    micro_batch_s: of the slowest stage and one micro-batch; once_s: once a step.

    kept_bytes: between steps and of contexts, on the fullest rank; passing_bytes: the most that comes and goes beside
    activations; held_bytes: activations of one micro-batch.
    """

    layout: PartLayout
    rows: Rows
    recompute: str
    micro_batch_s: float
    once_s: float
    kept_bytes: float
    passing_bytes: float
    held_bytes: float

    @cached_property
    def pipeline(self) -> int:
        """Stages."""
        return resolved(self.layout.section.pipeline)

    def bytes(self, ahead: int) -> float:
        """Of its fullest device. ahead: micro-batches that are held at most."""
        return self.kept_bytes + self.passing_bytes + ahead * self.held_bytes


@dataclass(frozen=True, eq=False)
class Scores:
    """Scores of layouts of one part for one division of a step, as arrays: of each layout with each choice."""

    layouts: Sequence[PartLayout]
    choices: Sequence[str]
    rows: Rows
    micro_batch_s: Numbers  # [layouts × choices], as all below
    once_s: Numbers
    kept: Numbers
    passing: Numbers
    held: Numbers

    def __len__(self) -> int:
        return len(self.micro_batch_s)

    def score(self, at: int) -> Score:
        """The one at a place of the arrays."""
        layout, choice = divmod(at, len(self.choices))
        figures = (self.micro_batch_s, self.once_s, self.kept, self.passing, self.held)
        own = (float(figure[at]) for figure in figures)
        return Score(self.layouts[layout], self.rows, self.choices[choice], *own)

    @cached_property
    def stages(self) -> Numbers:
        each = np.array([resolved(layout.section.pipeline) for layout in self.layouts], dtype=np.float64)
        return each.repeat(len(self.choices))

    @cached_property
    def numbers(self) -> np.ndarray:
        """What distinguishes layouts."""
        return np.array([id(layout) for layout in self.layouts], dtype=np.int64).repeat(len(self.choices))

    @cached_property
    def front(self) -> np.ndarray:
        """Places of those that no other beats in seconds and bytes."""
        seconds = (self.rows.micro_batches + self.stages - 1) * self.micro_batch_s + self.once_s
        taken = self.kept + self.passing + self.held
        order = np.lexsort((taken, seconds))
        before = np.minimum.accumulate(taken[order])
        leads = np.ones(len(order), dtype=bool)
        leads[1:] = taken[order][1:] < before[:-1]
        return order[leads]
