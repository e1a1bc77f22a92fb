"""What a forecast is made from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
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
AT_ONCE = 16  # layers of a part that are traced without being asked for; many take a minute


@dataclass(frozen=True)
class Question:
    """What a forecast is made from. plan: of the run. machine: that it is for."""

    plan: RunPlan
    counted: Counted
    machine: Machine
    loads: RunLoads

    @cached_property
    def schedule(self) -> Schedule:
        return make_schedule(self.plan.config.training.schedule, self.plan.graph, micro_batches(self.plan.config))

    @cached_property
    def arrangement(self) -> Arrangement:
        return arrange(self.plan.graph, self.schedule, "cuda" if self.machine.contexts else "cpu")


def is_quick(plan: RunPlan, counted: Counted) -> bool:
    """Whether a forecast needs no trace that takes a minute: each part was traced before, or few of its layers are."""
    cuts = {name: Cut.of(section) for name, section in parts(plan.config).items() if name in (VISION, DECODER)}
    slow = {name: cut for name, cut in cuts.items() if not counted.is_traced(name, cut)}
    return all(len(set(counted.stands(name, cut).values())) <= AT_ONCE for name, cut in slow.items())


def attempt(make: Callable[[], T]) -> T | str:
    """What `make` gives, or why it does not, for what is only said of a run: no defect of it may end the run itself."""
    try:
        return make()
    except DhpError as error:
        return str(error)
    except Exception as error:  # a family's own code, or a shape that no forecast has met
        return f"{type(error).__name__}: {error}"


def count_model(plan: RunPlan) -> Counted:
    """What is counted of a run's model, kept in the folder of lengths."""
    folder = plan.config.data.cache_dir
    training, kept = plan.config.training, None if folder is None else Path(folder)
    model = (plan.family, plan.source, plan.rules, plan.adapters)
    return Counted(*model, training.objective, kept, optimizer=training.optimizer)
