"""Units that cuts divide: seconds and bytes of layers.

A *unit* is what no cut divides: the embedding of tokens or patches, one layer, the merger or projector, the last norm
with the head. The units of one part or of two, in the order in which a micro-batch visits them, are what a partition
cuts. Seconds may be operations divided by a speed, or measured."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dhp.plan.count.row_bytes import NONE

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Saved:
    """One choice of recompute for a unit. held_bytes: of a micro-batch, from its forward to its backward; replay_bytes:
    added while backward recomputes it; replay_s: seconds of recomputing it for one micro-batch."""

    held_bytes: float
    replay_bytes: float = 0.0
    replay_s: float = 0.0


@dataclass(frozen=True)
class Unit:
    """One unit of a part, on one rank.

    layers: of the part's layers, how many it is: 1 of a layer, 0 of what comes before or behind the layers.

    forward_s, backward_s: of one micro-batch. Backward counts where the unit or one before it trains.

    parameters: numbers that it has. states_bytes: weights, gradients and optimizer. saved: by choice of recompute,
    `none` among them. output_bytes: of a micro-batch, handed over where the next unit is another stage's. trains: some
    of it is trained.

    cut: whether the stage may end behind it: `may`; `never`, as inside of a merger or before the head; `always`, as
    where a part ends whose stages hold nothing of the next."""

    name: str
    part: str
    layers: int
    forward_s: float
    backward_s: float
    parameters: int = 0
    states_bytes: float = 0.0
    saved: Mapping[str, Saved] = field(default_factory=lambda: {NONE: Saved(0.0)})
    output_bytes: float = 0.0
    trains: bool = True
    cut: Literal["may", "never", "always"] = "may"


@dataclass(frozen=True)
class StageLink:
    """Between the devices of two stages: a hand-over takes latency_s and its bytes / bytes_s."""

    bytes_s: float = math.inf
    latency_s: float = 0.0

    def seconds(self, output_bytes: float) -> float:
        """Of one hand-over, which the receiver waits for and the sender does not."""
        return self.latency_s + output_bytes / self.bytes_s


FREE = StageLink()  # hand-overs that take no time


@dataclass(frozen=True)
class PinnedUnit:
    """A unit and the run that must hold it: as of two parts in one chain, where one ends and the other begins."""

    unit: int
    run: int


class Positions:
    """Where the units can be cut: a cut at position p has p units in front of it.

    at: the positions a cut may have, 0 and the number of units among them, ascending. allowed: [a, b], whether a stage
    may hold the units from `at[a]` to `at[b]`."""

    def __init__(self, units: Sequence[Unit]):
        inside = [p for p, unit in enumerate(units[:-1], 1) if unit.cut != "never"]
        self.at = np.array([0, *inside, len(units)])
        forced = np.array([0, *(unit.cut == "always" for unit in units[:-1]), False]).cumsum()
        # A stage from a to b has a forced cut inside where one lies behind a and before b.
        until, before = forced[self.at], forced[np.maximum(self.at - 1, 0)]
        index = np.arange(len(self.at))
        self.allowed = (index[:, None] < index[None, :]) & (before[None, :] - until[:, None] <= 0)

    def of_runs(self, runs: int, held: PinnedUnit | None = None) -> NDArray[np.bool_]:
        """[runs, a, b]: whether this run may hold those units. held: what one of them must hold."""
        allowed = np.broadcast_to(self.allowed, (runs, *self.allowed.shape)).copy()
        if held is None:
            return allowed
        behind, before = self.at[:, None] > held.unit, self.at[None, :] <= held.unit
        allowed[: held.run] &= before
        allowed[held.run] &= ~behind & ~before
        allowed[held.run + 1 :] &= behind
        return allowed

    def sums(self, values: Sequence[float] | Numbers) -> Numbers:
        """[a, b]: the sum of the units' values from `at[a]` to `at[b]`; of no use where b < a."""
        total = np.concatenate([[0.0], np.cumsum(values)])[self.at]
        return total[None, :] - total[:, None]

    def before(self, values: Sequence[float] | Numbers) -> Numbers:
        """[a]: the sum of the units' values before `at[a]`."""
        return np.concatenate([[0.0], np.cumsum(values)])[self.at]


def first_trained(units: Sequence[Unit], trained_before: bool = False) -> int:
    """The first unit through which a backward goes; trained_before: what sends to the chain trains. Their number where
    nothing trains."""
    if trained_before:
        return 0
    return next((at for at, unit in enumerate(units) if unit.trains), len(units))


def layer_cuts(units: Sequence[Unit], cuts: Sequence[int]) -> dict[str, list[int]]:
    """Cuts by position → by part, the layers at which its stages after the first begin, as `text.cuts` has them. A cut
    between two parts is in neither."""
    found: dict[str, list[int]] = {}
    for cut in cuts:
        part = units[cut].part
        layer = sum(unit.layers for unit in units[:cut] if unit.part == part)
        if any(unit.part == part for unit in units[:cut]):
            found.setdefault(part, []).append(layer)
    return found
