"""What is decided of a run from its configuration and the model's shape, each once, before any actor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from dhp.config.parts import model_name, parts
from dhp.config.schema import Config
from dhp.core.graph import StageGraph
from dhp.core.parameters import AdapterSettings, TrainingRules
from dhp.models.family import Family
from dhp.models.registry import load_family
from dhp.models.shape import Parameter
from dhp.plan.model_shapes import Shapes
from dhp.plan.stage_graph import make_graph
from dhp.plan.trainable import adapters_of, training_rules


@dataclass(frozen=True)
class RunPlan:
    """One run. config: resolved. source: where the model's configuration is read from (`dhp.models.pretrained`).

    family: the model's, with the parts of the run. rules: what is trained, and how. adapters: by part. graph: its
    stages.
    """

    config: Config
    source: str
    family: Family
    rules: TrainingRules
    adapters: Mapping[str, AdapterSettings]
    graph: StageGraph

    @cached_property
    def parameters(self) -> tuple[Parameter, ...]:
        """All parameters of the model, adapters' among them."""
        from dhp.models.empty import list_parameters  # imports modeling code, which takes a second

        return list_parameters(self.source, self.family, self.adapters)


def plan_run(config: Config, source: str | None = None, trains: bool = True, shapes: Shapes | None = None) -> RunPlan:
    """The plan of a resolved configuration. source: None for the model's own directory or hub id. trains: false where
    nothing is trained, whatever the configuration says. shapes: of the model; None: it is counted where that is needed.
    Raises ConfigError and ModelError."""
    source = source or model_name(config)
    family, adapters = load_family(source).having(parts(config)), adapters_of(config)
    rules = training_rules(config.training, family, adapters)
    return RunPlan(config, source, family, rules, adapters, make_graph(config, family, source, trains, shapes))
