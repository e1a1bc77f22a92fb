"""Parameters of each part and stage of a run on a rank, counted by the model's own tensor-parallel plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from dhp.core.graph import StageSpec
from dhp.core.parameters import AdapterSettings, TrainingRules, is_inside
from dhp.models.family import Family
from dhp.models.shape import HeldParameter, PartShape, sum_shape
from dhp.models.types import chunks_of

if TYPE_CHECKING:
    from dhp.trainer.plan import RunPlan


def stage_shapes(plan: RunPlan) -> dict[str, PartShape]:
    """Parameters of each stage."""
    return {stage.name: stage_shape(plan, stage) for stage in plan.graph.stages}


def stage_shape(plan: RunPlan, stage: StageSpec) -> PartShape:
    """Parameters of one stage."""
    part, tensor = plan.family.parts[stage.part], stage.degrees.tensor
    dropped = part.absent(chunks_of(stage.chunks, part.whole))
    sharing = stage.degrees.holders // tensor
    held = count_held(plan.family, plan.source, plan.rules, plan.adapters, stage.part, tensor, sharing, dropped)
    return sum_shape(held, bool(plan.rules.selects or plan.family.idle), plan.config.training.optimizer)


def count_held(
    family: Family,
    source: str,
    rules: TrainingRules,
    adapters: Mapping[str, AdapterSettings],
    name: str,
    tensor: int,
    sharing: int,
    dropped: Sequence[str] = (),
) -> tuple[HeldParameter, ...]:
    """What the fullest of `tensor` ranks holds of part `name`, whose experts so many replicas (sharing) share out,
    without the modules `dropped`."""
    from dhp.models.empty import adapt, held_parameters
    from dhp.models.hidden_matrices import hidden_matrices
    from dhp.models.quantized import find_quantized
    from dhp.parallel.tensor.styles import with_fused

    part, asked = family.parts[name], adapters.get(name)
    rounded = asked is not None and asked.quantization is not None
    return held_parameters(
        source,
        (*family.outside(name), *dropped),
        tensor,
        part.kept_whole(tensor),
        with_fused(part.tensor_plan, part.fused),
        partial(_is_trained, rules, family) if rules.selects or family.idle else None,
        part.shared,
        sharing,
        partial(adapt, family=family, adapters={} if asked is None else {name: asked}),
        partial(find_quantized, layers=part.layers, trains=rules.trains) if rounded else lambda _: (),
        partial(hidden_matrices, family=family),
    )


def _is_trained(rules: TrainingRules, family: Family, name: str) -> bool:
    return rules.trains(name) and not is_inside(name, family.idle)
