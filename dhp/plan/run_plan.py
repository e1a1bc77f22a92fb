"""Decides a run once, before any actor: its model, and the graph of its stages."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dhp.config.schema import Config
from dhp.core.graph import StageGraph
from dhp.core.parameters import AdapterSettings, TrainingRules
from dhp.models.family import Family
from dhp.models.shape import Parameter
from dhp.plan.count.counted_model import Counted, count_model
from dhp.plan.stage_graph import make_graph


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
