"""What a forecast is made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from dhp.config.parts import DECODER, parts
from dhp.config.resolve import micro_batches
from dhp.core.errors import DhpError
from dhp.models.family import VISION
from dhp.plan.bench.machine import Machine
from dhp.plan.count.costs import Arrangement, arrange
from dhp.plan.count.counted_model import Counted, Cut
from dhp.plan.count.loads import RunLoads
from dhp.plan.run_plan import RunPlan
from dhp.step.schedule import Schedule, make_schedule

T = TypeVar("T")


@dataclass(frozen=True)
class Question:
    """What a forecast is made from. plan: of the run. machine: that it is for."""

    plan: RunPlan
    machine: Machine
    loads: RunLoads

    @property
    def counted(self) -> Counted:
        """The run's model."""
        return self.plan.counted

    @cached_property
    def schedule(self) -> Schedule:
        return make_schedule(self.plan.config.training.schedule, self.plan.graph, micro_batches(self.plan.config))

    @cached_property
    def arrangement(self) -> Arrangement:
        return arrange(self.plan.graph, self.schedule, "cuda" if self.machine.contexts else "cpu")


def is_quick(plan: RunPlan) -> bool:
    """Whether a forecast needs no trace that takes a minute: each part was traced before, or few of its layers are."""
    cuts = {name: Cut.of(section) for name, section in parts(plan.config).items() if name in (VISION, DECODER)}
    counted = plan.counted
    return all(counted.is_traced(name, cut) or counted.is_quick(name, cut) for name, cut in cuts.items())


def attempt(make: Callable[[], T]) -> T | str:
    """What `make` gives, or why it does not, for what is only said of a run: no defect of it may end the run itself."""
    try:
        return make()
    except DhpError as error:
        return str(error)
    except Exception as error:  # a family's own code, or a shape that no forecast has met
        return f"{type(error).__name__}: {error}"
