"""A step before anything runs: the schedule in assumed seconds, what of it devices have no work for, and who waits."""

from __future__ import annotations

from collections.abc import Mapping

from dhp.config.parts import DECODER
from dhp.config.resolve import micro_batches
from dhp.core.graph import Edge, Node, StageSpec
from dhp.models.flops import OPERATIONS, VisionWork
from dhp.models.shape import decoder_sizes
from dhp.models.trained_flops import find_passes
from dhp.planner.units import Unit, first_trained
from dhp.step.schedule import Action, Forward, make_schedule
from dhp.step.timed import Timeline, play
from dhp.trainer.partition import trained_shares
from dhp.trainer.plan import RunPlan
from dhp.trainer.traces import traced_rows
from dhp.trainer.units import SPEED, assumed_rows, decoder_units, link

MOST_MICRO_BATCHES = 64  # of a step that is played
_LEAST = 0.01  # of a step: who waits less is not named

Seconds = Mapping[Node, tuple[float, float]]  # forward and backward of one micro-batch


def expected_step(plan: RunPlan) -> Timeline | None:
    """The step of a run, of `assumed_rows`. None where a part's operations are not known by its patches."""
    graph, config = plan.graph, plan.config
    seconds: dict[Node, tuple[float, float]] = {}
    for stage in graph.stages:
        if stage.part == DECODER:
            continue
        work = plan.family.encoders[stage.part].work
        if not isinstance(work, VisionWork):
            return None
        seconds[Node(stage.name)] = _encoder(plan, stage, work)
    units = _units(plan)
    for stage in graph.of_part(DECODER):
        for node, layers in zip(stage.nodes, stage.chunks, strict=True):
            seconds[node] = _run(plan, units, node, layers)
    schedule = make_schedule(config.training.schedule, graph, min(micro_batches(config), _most(plan)))
    programs = {stage.name: [a for a in schedule if a.node.stage == stage.name] for stage in graph.stages}

    def of(action: Action) -> float:
        return seconds[action.node][not isinstance(action, Forward)]

    hand_over = link().seconds(units[1].output_bytes)

    def hop(edge: Edge, back: bool) -> float:
        source, target = (graph.stage(node.stage).devices for node in (edge.source, edge.target))
        return 0.0 if set(source) & set(target) else hand_over

    return play(programs, graph, of, hop)


def _most(plan: RunPlan) -> int:
    """As many micro-batches as are played, in whole groups of the decoder's stages."""
    stages = len(plan.graph.of_part(DECODER))
    return MOST_MICRO_BATCHES - MOST_MICRO_BATCHES % stages or stages


def _units(plan: RunPlan) -> tuple[Unit, ...]:
    trained = trained_shares(plan.family, plan.source, plan.rules, plan.adapters)
    return decoder_units(plan.config, plan.family, decoder_sizes(plan.source), trained)


def _run(plan: RunPlan, units: tuple[Unit, ...], node: Node, layers: range) -> tuple[float, float]:
    """Of a run of the decoder's layers, with the embedding or the head where it is the first or the last."""
    before = any(edge.gradients for edge in plan.graph.inputs(plan.graph.of_part(DECODER)[0].nodes[0]))
    first, last = layers.start == 0, layers.stop == len(units) - 2
    own = range(layers.start + 1 - first, layers.stop + 1 + last)  # the embedding is a unit
    begins = first_trained(units, before)
    backward = sum(units[at].backward_s for at in own if at >= begins)
    return sum(units[at].forward_s for at in own), backward if plan.graph.goes_back(node) else 0.0


def _encoder(plan: RunPlan, stage: StageSpec, work: VisionWork) -> tuple[float, float]:
    rows = traced_rows(plan.config, plan.family, stage.part)
    pictures = assumed_rows(plan.config).samples if rows.patches else 0
    each = rows.patches / max(pictures, 1)
    pairs = pictures * (work.window_pair * each * each / rows.windows + work.segment_pair * each * each)
    layers = len(plan.family.parts[stage.part].layers.kinds)
    done = (rows.patches * work.token + pairs) * len(stage.layers) / layers
    done += rows.patches * work.patch if 0 in stage.layers else 0
    done += work.embedding * rows.features if layers - 1 in stage.layers else 0
    forward_s = OPERATIONS * done / stage.degrees.tensor / SPEED
    passes = find_passes(plan.family, plan.parameters, plan.rules)[stage.part].layers
    goes = any(map(plan.graph.goes_back, stage.nodes))
    return forward_s, forward_s * (passes.inputs + passes.weights) if goes else 0.0


def bubble_lines(timeline: Timeline) -> list[str]:
    """What of a step devices have no work for, and for whom their stages wait."""
    idle = {stage: timeline.idle(devices[0]) for stage, devices in timeline.on.items()}
    each = ", ".join(f"{stage} {share:.0%}" for stage, share in idle.items())
    lines = [f"bubble         {timeline.bubble:.0%} of the devices' time (by operations; {each})"]
    waits = [
        f"{stage} {seconds / timeline.step_s:.0%} for {other}"
        for stage, of_stage in timeline.waits().items()
        for other, seconds in sorted(of_stage.items(), key=lambda one: -one[1])
        if seconds >= _LEAST * timeline.step_s
    ]
    return [*lines, f"waiting        {', '.join(waits)}"] if waits else lines
