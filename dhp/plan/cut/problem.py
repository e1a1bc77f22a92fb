"""What is to be cut, and how it was cut."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dhp.plan.cut.simulate import Programs, Task, in_flight, merged
from dhp.plan.cut.units import FREE, PinnedUnit, Positions, StageLink, Unit, first_trained


@dataclass(frozen=True)
class PartitionProblem:
    """Units that are to be cut into runs, one behind another, run r for stage r % stages.

    programs: what each stage does in a step. link: between two stages. budget_bytes: of a stage's device, for states
    and activations. trained_before: what sends to the first unit trains. held: a unit, and the run that must hold it.
    """

    units: tuple[Unit, ...]
    programs: Programs
    link: StageLink = FREE
    budget_bytes: float = math.inf
    trained_before: bool = False
    held: PinnedUnit | None = None

    @property
    def stages(self) -> int:
        return len(self.programs)

    @cached_property
    def runs(self) -> int:
        """Runs of all stages together."""
        return 1 + max(work.run for program in self.programs for work in program)

    @cached_property
    def micro_batches(self) -> int:
        """Of a step."""
        return 1 + max(work.micro_batch for program in self.programs for work in program)

    @cached_property
    def order(self) -> tuple[Task, ...]:
        """All programs as one."""
        return merged(self.programs)

    @cached_property
    def in_flight(self) -> tuple[int, ...]:
        """Of each stage, the most micro-batches that it holds at once."""
        return tuple(map(in_flight, self.programs))

    def units_of(self, run: int) -> tuple[Unit, ...]:
        """The units as that run keeps them. Where one part ends in it and the next begins, two processes share the
        device, and the first part's is a micro-batch ahead: what its units keep counts once more."""
        return self._shared if self.held is not None and run == self.held.run else self.units

    @cached_property
    def _shared(self) -> tuple[Unit, ...]:
        assert self.held is not None  # `units_of` has made sure
        count, end = self.in_flight[self.held.run], self.held.unit + 1
        more = min(count + 1, self.micro_batches) / count
        ahead = (
            {name: replace(own, held_bytes=own.held_bytes * more) for name, own in unit.saved.items()}
            for unit in self.units[:end]
        )
        own = (replace(unit, saved=saved) for unit, saved in zip(self.units[:end], ahead, strict=True))
        return (*own, *self.units[end:])

    @cached_property
    def positions(self) -> Positions:
        return Positions(self.units)

    @cached_property
    def allowed(self) -> NDArray[np.bool_]:
        """[runs, a, b]: whether the run may hold the units from `positions.at[a]` to `positions.at[b]`."""
        return self.positions.of_runs(self.runs, self.held)

    @cached_property
    def first_back(self) -> int:
        """The first unit through which a backward goes."""
        return first_trained(self.units, self.trained_before)


@dataclass(frozen=True)
class Partition:
    """cuts: positions, the number of units before each stage but the first. step_s: of the step, simulated.

    recompute: of each unit, where there was a budget to keep. bound_s: no cut that fits takes less, as was proved.
    tried: cuts that were simulated."""

    cuts: tuple[int, ...]
    step_s: float
    recompute: tuple[str, ...] = ()
    bound_s: float = 0.0
    tried: int = 0

    @property
    def gap(self) -> float:
        """By which share a better cut may be faster at most; 0 where there is none."""
        return max(0.0, 1 - self.bound_s / self.step_s) if self.step_s else 0.0


def bounds_of(problem: PartitionProblem, cuts: Sequence[int]) -> list[tuple[int, int]]:
    """(first unit, end) of each run."""
    ends = [0, *cuts, len(problem.units)]
    return list(zip(ends, ends[1:]))
