"""Decides a run once, before any actor starts."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from dhp.config.parts import DECODER, parts
from dhp.config.resolve import micro_batches
from dhp.config.schema import Config
from dhp.core.errors import DhpError
from dhp.core.graph import StageGraph
from dhp.core.parameters import AdapterSettings, TrainingRules
from dhp.models.family import VISION, Family
from dhp.models.shape import Parameter
from dhp.plan.bench.machine import Machine
from dhp.plan.count.costs import Arrangement, arrange
from dhp.plan.count.counted_model import Counted, Cut, count_model
from dhp.plan.count.loads import RunLoads
from dhp.plan.stage_graph import make_graph
from dhp.step.schedule import Schedule, make_schedule


@dataclass(frozen=True)
class RunPlan:
    """One run. config: resolved. counted: its model, with the parts of the run, what is trained, and how. graph: its
    stages."""

    config: Config
    counted: Counted
    graph: StageGraph

    @property
    def source(self) -> str:
        """Where the model's configuration is read from (`dhp.models.pretrained`)."""
        return self.counted.source

    @property
    def family(self) -> Family:
        """The model's, with the parts of the run."""
        return self.counted.family

    @property
    def rules(self) -> TrainingRules:
        """What is trained, and how."""
        return self.counted.rules

    @property
    def adapters(self) -> Mapping[str, AdapterSettings]:
        """By part."""
        return self.counted.adapters

    @property
    def parameters(self) -> tuple[Parameter, ...]:
        """All parameters of the model, adapters' among them."""
        return self.counted.parameters


def plan_run(config: Config, source: str | None = None, trains: bool = True, counted: Counted | None = None) -> RunPlan:
    """The plan of a resolved configuration. source: None for the model's own directory or hub id. trains: false where
    nothing is trained, whatever the configuration says. counted: the model, where it was counted before. Raises
    ConfigError and ModelError."""
    counted = counted or count_model(config, source)
    return RunPlan(config, counted, make_graph(config, counted, trains))


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
