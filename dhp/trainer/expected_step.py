"""A step before anything runs: the schedule in assumed seconds, what of it devices have no work for, and who waits."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from dhp.config.parts import DECODER
from dhp.config.resolve import micro_batches
from dhp.core.graph import Edge, Node, StageGraph
from dhp.models.family import VISION
from dhp.models.flops import VisionWork
from dhp.plan.count.decoder_units import decoder_units, link
from dhp.plan.count.tower_units import tower_units
from dhp.plan.count.units import Unit, first_trained
from dhp.plan.cut.partition import trained_shares
from dhp.plan.model_shapes import ModelShapes
from dhp.plan.run_plan import RunPlan
from dhp.step.schedule import Action, Forward, make_schedule
from dhp.step.timed import Timeline, draw_timeline, play

MOST_MICRO_BATCHES = 64  # of a step that is played
_WIDEST = 118  # characters of a line that is drawn
_COLUMNS = (56, 52, 48, 44, 40, 36, 32, 28)  # in which a step is drawn
_LEAST = 0.01  # of a step: who waits less is not named

Seconds = Mapping[Node, tuple[float, float]]  # forward and backward of one micro-batch


def expected_step(plan: RunPlan, most: int | None = None) -> Timeline | None:
    """The step of a run, of `assumed_rows`. most: micro-batches that are played; None: `MOST_MICRO_BATCHES`.
    The result is None where a part's operations are not known by its patches."""
    graph, config = plan.graph, plan.config
    work = [plan.family.encoders[name].work for name in graph.parts() if name != DECODER]
    if not all(isinstance(own, VisionWork) for own in work):
        return None
    units = {VISION: tower_units(config, plan.family, plan.parameters, plan.rules), DECODER: _decoder_units(plan)}
    seconds: dict[Node, tuple[float, float]] = {}
    for stage in graph.stages:
        for node, layers in zip(stage.nodes, stage.chunks, strict=True):
            seconds[node] = _run(plan, units[stage.part], stage.part, node, layers)
    schedule = make_schedule(config.training.schedule, graph, min(micro_batches(config), most or _most(plan)))
    programs = {stage.name: [a for a in schedule if a.node.stage == stage.name] for stage in graph.stages}

    def of(action: Action) -> float:
        return seconds[action.node][not isinstance(action, Forward)]

    def hop(edge: Edge, back: bool) -> float:
        source, target = (graph.stage(node.stage) for node in (edge.source, edge.target))
        if set(source.devices) & set(target.devices):
            return 0.0
        inside = source.part == target.part
        sent = units[source.part][1 if inside else -1].output_bytes  # states of a layer, or what the decoder gets
        return link().seconds(sent * len(edge.tensors))

    return play(programs, graph, of, hop)


def _most(plan: RunPlan) -> int:
    """As many micro-batches as are played, in whole groups of the decoder's stages."""
    stages = len(plan.graph.of_part(DECODER))
    return MOST_MICRO_BATCHES - MOST_MICRO_BATCHES % stages or stages


def _decoder_units(plan: RunPlan) -> tuple[Unit, ...]:
    shapes = ModelShapes(plan.family, plan.source, plan.adapters)
    trained = trained_shares(plan.family, shapes, plan.rules)
    return decoder_units(plan.config, plan.family, shapes.sizes, trained)


def _run(plan: RunPlan, units: tuple[Unit, ...], part: str, node: Node, layers: range) -> tuple[float, float]:
    """Of a run of a part's layers, with what is before or behind them where it is the first or the last."""
    before = any(edge.gradients for edge in plan.graph.inputs(plan.graph.of_part(part)[0].nodes[0]))
    first, last = layers.start == 0, layers.stop == len(units) - 2
    own = range(layers.start + 1 - first, layers.stop + 1 + last)  # what is before the layers is a unit
    begins = first_trained(units, before)
    backward = sum(units[at].backward_s for at in own if at >= begins)
    return sum(units[at].forward_s for at in own), backward if plan.graph.goes_back(node) else 0.0


def timeline_lines(timeline: Timeline, graph: StageGraph, again: Collection[str]) -> list[str]:
    """The step with seconds to scale, in as many columns as a line has room for; none where that is too few. again: see
    `draw`."""
    names = [stage.name for stage in graph.stages]
    for columns in _COLUMNS:
        drawn = draw_timeline(timeline, names, timeline.step_s / columns, again).splitlines()
        if max(map(len, drawn)) <= _WIDEST:
            seen = sum(cell not in (".", "-") for line in drawn for cell in line.split()[1:])
            hidden = f"; {len(timeline.spans) - seen} too short to be seen" if seen < len(timeline.spans) else ""
            head = f"in time        a column is {timeline.step_s / columns:.2g} s, - goes on{hidden}:"
            return [head, *(f"  {line}" for line in drawn)]
    return []


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
