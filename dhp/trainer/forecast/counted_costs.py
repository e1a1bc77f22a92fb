"""What layers cost under each choice of recompute, by the model's shape: for a plan before the first step."""

from __future__ import annotations

from dataclasses import astuple

from dhp.config.parts import parts
from dhp.config.recompute import OFFLOAD
from dhp.config.resolve import micro_batches
from dhp.core.graph import StageSpec
from dhp.planner.costs import LayerCost, StageCosts
from dhp.planner.units import NONE
from dhp.trainer.forecast.counted import Cut
from dhp.trainer.forecast.question import Question
from dhp.trainer.forecast.seconds import unit_seconds
from dhp.trainer.forecast.stage_bytes import rows_of_stage
from dhp.trainer.row_bytes import CHOICES


def counted_costs(asked: Question) -> dict[str, StageCosts]:
    """By stage through which gradients go back, as `dhp.planner.profile` has them of measured steps. Raises ModelError
    where what layers keep is not known."""
    graph = asked.plan.graph
    going = [stage for stage in graph.stages if any(map(graph.goes_back, stage.nodes))]
    return {stage.name: _of_stage(asked, stage) for stage in going}


def _of_stage(asked: Question, stage: StageSpec) -> StageCosts:
    section = parts(asked.plan.config)[stage.part]
    kept, rows = asked.counted.keeps(stage.part, Cut.of(section)), rows_of_stage(asked, stage)
    rates = asked.machine.of(stage.part, section.dtype)
    units = unit_seconds(asked.counted, stage.part, section, stage.degrees, asked.loads, rates)
    count = micro_batches(asked.plan.config)
    reported = asked.plan.family.parts[stage.part].layers.kinds  # a trace has more of them
    kinds = tuple(reported[at] for at in stage.layers)
    layers: dict[str, dict[str, LayerCost]] = {kind: {} for kind in kinds}
    for at, kind in zip(stage.layers, kinds, strict=True):
        for choice in (*CHOICES, OFFLOAD):  # which is the last resort, and never chosen for its seconds
            traced = (kept.kinds[at], choice)
            cost = LayerCost(
                kept.held[traced].of(rows), kept.replay[traced].of(rows), count * units[at + 1].again_s(choice)
            )
            layers[kind][choice] = _most(cost, layers[kind].get(choice, cost))
    after = kept.after.of(rows) if len(kept.kinds) - 1 in stage.layers else 0.0
    all_of = kept.held_by(stage.layers, NONE).of(rows)
    before = max(0.0, all_of - after - sum(layers[kind][NONE].held_bytes for kind in kinds))
    return StageCosts(rows.patches or rows.tokens, kinds, before, after, layers)


def _most(one: LayerCost, other: LayerCost) -> LayerCost:
    """The larger of each."""
    both = zip(astuple(one), astuple(other), strict=True)
    return LayerCost(*(max(pair) for pair in both))
