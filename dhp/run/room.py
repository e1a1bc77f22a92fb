"""Checks, before anything is loaded, that what stages keep between steps fits the GPUs that they share."""

from __future__ import annotations

from dhp.base.errors import ConfigError
from dhp.base.stages import StageGraph
from dhp.config.parts import model_name
from dhp.config.schema import Config
from dhp.models.config_source import config_source
from dhp.run.dry_run import footprints, gigabytes, stage_shapes
from dhp.run.footprint import Footprint


def require_room(config: Config, graph: StageGraph, memory: int | None) -> None:
    """Raise ConfigError where the stages on one GPU keep more than its `memory` bytes; None: not known.

    Weights, gradients, the optimizer and contexts alone count, which a run cannot do without. What a step takes besides
    is for the planner, or for CUDA to say.
    """
    if memory is None:
        return
    source = config_source(model_name(config))
    taken = footprints(config, graph, source, stage_shapes(config, graph, source))
    for device in range(graph.device_count()):
        _require(config, {stage.name: taken[stage.name] for stage in graph.stages if device in stage.devices}, memory)


def _require(config: Config, taken: dict[str, Footprint], memory: int) -> None:
    kept = {name: one.states.total + one.runtime for name, one in taken.items()}
    if sum(kept.values()) <= memory:
        return
    each = ", ".join(f"{name} {gigabytes(count)}" for name, count in kept.items())
    apart = " Or give each stage GPUs of its own (cluster.collocate=false)." if len(kept) > 1 else ""
    raise ConfigError(
        f"the stages on one GPU keep {gigabytes(sum(kept.values()))} between steps ({each}: weights, gradients, "
        f"optimizer and CUDA's contexts), and it has {gigabytes(memory)}. Cut them over more actors (text.num_actors, "
        f"text.zero_stage=3, text.tensor), or train less (text.lora.rank, training.frozen).{apart} What each choice "
        "takes: training.dry_run=true"
    )
