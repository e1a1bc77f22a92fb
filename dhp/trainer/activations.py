"""What activations take on each device, before anything runs: what layers keep of an assumed micro-batch, and how many
micro-batches the schedule has a stage hold."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dhp.config.layout import read_choices
from dhp.config.parts import parts, resolved
from dhp.config.resolve import micro_batches
from dhp.core.errors import ModelError
from dhp.core.graph import StageSpec
from dhp.core.reports import StageUsage
from dhp.plan.count.costs import Arrangement, LayerCost, Plan, StageCosts, arrange, predicted_bytes
from dhp.plan.count.traces import traced
from dhp.plan.run_plan import RunPlan
from dhp.step.schedule import make_schedule


@dataclass(frozen=True)
class Activations:
    """costs: by stage through which a backward goes; plan: what its layers recompute. unknown: why those of other
    stages are not known."""

    arrangement: Arrangement
    costs: dict[str, StageCosts]
    plan: Plan
    unknown: tuple[str, ...] = ()

    def stage_bytes(self, stage: str) -> float:
        """The most that a rank of the stage takes, of all micro-batches that it holds."""
        return self.device_bytes(frozenset({stage}))

    def device_bytes(self, stages: frozenset[str]) -> float:
        """The most that ranks of these stages take on a device that they share."""
        own = {name: costs for name, costs in self.costs.items() if name in stages}
        return predicted_bytes(own, self.plan, replace(self.arrangement, sharing=(stages,)))


def expected_activations(plan: RunPlan) -> Activations:
    """Of a run. With recompute=auto all is recomputed, which is where the planner begins."""
    config, graph = plan.config, plan.graph
    device = "cpu" if config.cluster.device == "cpu" else "cuda"
    schedule = make_schedule(config.training.schedule, graph, micro_batches(config))
    costs: dict[str, StageCosts] = {}
    unknown = []
    for name in graph.parts():
        kept = [stage for stage in graph.of_part(name) if any(map(graph.goes_back, stage.nodes))]
        if not kept:
            continue
        before = any(graph.goes_back(edge.source) for node in kept[0].nodes for edge in graph.inputs(node))
        try:
            usage = traced(config, plan.family, plan.source, name, plan.rules, before)
        except ModelError as error:
            unknown.append(str(error))
            continue
        costs |= {stage.name: stage_costs(stage, usage) for stage in kept}
    written = {name: resolved(section.recompute) for name, section in parts(config).items()}
    chosen = {
        stage.name: tuple(read_choices(written[stage.part], _layers(plan, stage.part))[at] for at in stage.layers)
        for stage in graph.stages
    }
    return Activations(arrange(graph, schedule, device), costs, chosen, tuple(unknown))


def stage_costs(stage: StageSpec, usage: StageUsage) -> StageCosts:
    """Those of a stage, from its whole part's. Each layer is a kind of its own: what layers share, as rotary angles,
    the first one keeps, and so does the first of each stage."""
    own = stage.layers
    layers = {str(at): _cost(usage, at, shares=at == own[0] and at > 0) for at in own}
    ends = (
        usage.before_bytes if 0 in own else 0,
        usage.after_bytes if len(usage.layers) - 1 in own else 0,
    )
    return StageCosts(usage.rows, tuple(map(str, own)), *ends, layers)


def _cost(usage: StageUsage, at: int, shares: bool) -> dict[str, LayerCost]:
    layer = usage.layers[at]
    more = shared_bytes(usage) if shares else 0
    return {layer.choice: LayerCost(layer.held_bytes + more, layer.replay_bytes, 0.0)}


def shared_bytes(usage: StageUsage) -> int:
    """What the first layer keeps beyond another of its kind and choice."""
    first, *others = usage.layers
    alike = [one.held_bytes for one in others if (one.kind, one.choice) == (first.kind, first.choice)]
    return max(0, first.held_bytes - min(alike)) if alike else 0


def _layers(plan: RunPlan, part: str) -> int:
    return len(plan.family.parts[part].layers.kinds)
