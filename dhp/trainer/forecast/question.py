"""What a forecast is made from."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from dhp.config.resolve import micro_batches
from dhp.planner.costs import Arrangement
from dhp.step.schedule import Schedule, make_schedule
from dhp.trainer.forecast.counted import Counted
from dhp.trainer.forecast.loads import RunLoads
from dhp.trainer.forecast.machine import Machine
from dhp.trainer.plan import RunPlan
from dhp.trainer.recompute import arrange

if TYPE_CHECKING:
    pass


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


def count_model(plan: RunPlan) -> Counted:
    """What is counted of a run's model, kept in the folder of lengths."""
    folder = plan.config.data.cache_dir
    objective = plan.config.training.objective
    return Counted(
        plan.family, plan.source, plan.rules, plan.adapters, objective, None if folder is None else Path(folder)
    )
