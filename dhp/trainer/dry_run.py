"""Prints a run's layout, bytes and forecast, starting nothing."""

from collections.abc import Collection, Iterable

import numpy as np

from dhp.config.parts import DECODER, decoder, model_name, parts, resolved
from dhp.config.schema import Config, PartConfig
from dhp.config.steps import micro_batches, vision_batch
from dhp.core.errors import ConfigError
from dhp.core.graph import StageGraph, StageSpec
from dhp.core.parameters import EXACT_STATES
from dhp.core.text import aligned, binary_size
from dhp.data.balance.packs import Loads
from dhp.data.remote.places import missing_data
from dhp.models.pretrained import config_source
from dhp.models.shape import PartShape
from dhp.plan.batches import a_step, assumed_rows, rows_by_tokens, unreached
from dhp.plan.count.state_bytes import RankBytes, by_zero_stage, copied_bytes, rank_bytes, runtime_bytes
from dhp.plan.cut.partition import is_joint, part_cuts
from dhp.plan.forecast.forecast import play_step
from dhp.plan.forecast.moments import Moment, shape_of
from dhp.plan.run_plan import RunPlan, plan_run, stage_choices
from dhp.plan.search.verdict import Expected, expect, verdict
from dhp.step.schedule import draw, make_schedule
from dhp.step.timed import Timeline, draw_timeline
from dhp.trainer.settings import FULLEST_FIRST, table_of_training

_WIDEST = 118  # characters of a line that is drawn
_COLUMNS = (56, 52, 48, 44, 40, 36, 32, 28)  # in which a step is drawn
_LEAST = 0.01  # of a step: who waits less is not named
_NAMED = 0.01  # of a moment's bytes: what takes less is not named
CLOCK_MICRO_BATCHES = 8  # of a step that the clock table shows at most

_HEADINGS = ("stage", "layout", "ranks", "parameters", "a rank", "of these whole", "weights", "gradients", "optimizer")


def dry_run(config: Config) -> str:
    """The table and notes to print. `config` has been through `dhp.trainer.preflight.prepare`. Writes nothing."""
    name = model_name(config)
    plan = plan_run(config, config_source(name))
    graph, expected = plan.graph, expect(plan)
    shapes = {stage.name: shape_of(plan, stage) for stage in graph.stages}
    states = {stage.name: rank_bytes(parts(config)[stage.part], stage, shapes[stage.name]) for stage in graph.stages}
    lines = [f"dry run of {config.name}", f"model          {name}"]
    if plan.source != name:
        lines.append(f"its shape      {plan.source}")
    rows = [_row(config, stage, shapes[stage.name], states[stage.name]) for stage in graph.stages]
    lines += ["", *aligned([_HEADINGS, *rows], left=2), "", *_zero_stages(config, graph, shapes), ""]
    lines += [*_devices(graph, states, expected), "", *table_of_training(plan), "", *_pipeline(plan, expected)]
    lines += [*_rows(config), *_host_lines(config, graph, shapes)]
    if config.data.fullest_first:
        lines.append(f"data           {FULLEST_FIRST}")
    missing = missing_data(config)
    lines += [f"data           {message}" for message in missing]
    passed = "every check but these of the data passed" if missing else "every check passed"
    return "\n".join([*lines, *verdict(expected), "", f"{passed}; nothing was started"])


def _rows(config: Config) -> list[str]:
    """What a micro-batch is assumed to be, and how many make a step."""
    training, assumed = config.training, assumed_rows(config)
    alike = Loads(np.array([assumed.pictures]), np.array([assumed.tokens]))
    each = "rows" if rows_by_tokens(config) else "samples"
    times = "" if each == "rows" else f"micro_batch_size {training.micro_batch_size} × "
    return [
        f"assumed        micro-batches of {assumed}",
        *(f"data           {line}" for line in unreached(config, alike)),
        f"a step         {a_step(config)} {each} = {DECODER}.data {decoder(config).data} × {times}"
        f"{micro_batches(config)} micro-batches" + _pictures(config),
    ]


def _pictures(config: Config) -> str:
    batch = vision_batch(config)
    return f", the pictures of {batch} of them in each pass of an encoder" if batch > 1 else ""


def _host_lines(config: Config, graph: StageGraph, shapes: dict[str, PartShape]) -> list[str]:
    if not config.training.save_in_background:
        return []
    sections = parts(config)
    kept = {one.name: copied_bytes(sections[one.part], one, shapes[one.name]) for one in graph.stages}
    each = ", ".join(f"{binary_size(held)} a {name} rank" for name, held in kept.items())
    return [f"checkpoints    copied to host memory and written behind steps: {each} at most"]


def _zero_stages(config: Config, graph: StageGraph, shapes: dict[str, PartShape]) -> list[str]:
    """What weights, gradients and optimizer of a rank would take under each ZeRO stage; the chosen one in brackets."""
    rows = [("states of a rank", *(f"zero_stage {stage}" for stage in range(4)))]
    for stage in graph.stages:
        part, shape = getattr(config, stage.part), shapes[stage.name]
        sizes = by_zero_stage(part, stage, shape)
        found = {zero: "-" if held is None else binary_size(held) for zero, held in sizes.items()}
        found[part.zero_stage] = f"[{binary_size(rank_bytes(part, stage, shape).total)}]"
        rows.append((stage.name, *found.values()))
    return aligned(rows, left=2)


def _row(config: Config, stage: StageSpec, shape: PartShape, memory: RankBytes) -> tuple[str, ...]:
    part: PartConfig = getattr(config, stage.part)
    layout = str(stage.degrees) + (f", zero_stage {part.zero_stage}" if part.zero_stage else "") + f", {part.dtype}"
    if stage.trains and part.state_bytes != EXACT_STATES:
        layout += f", state_bytes {part.state_bytes}"
    share = 1.0 if shape.trained is None else shape.trained / max(shape.per_rank, 1)
    layout += ", frozen" if not stage.trains else f", trains {100 * share:.3g}%" if share < 1 else ""
    counts = (shape.total, shape.per_rank, shape.replicated)
    held = (memory.weights, memory.gradients, memory.optimizer)
    return (stage.name, layout, str(stage.degrees.world), *(f"{n:,}" for n in counts), *map(binary_size, held))


def _devices(graph: StageGraph, states: dict[str, RankBytes], expected: Expected) -> list[str]:
    """The number of devices, the ranks that share one, and what a rank of each stage takes at its fullest moment."""
    count = graph.device_count()
    on = [[stage for stage in graph.stages if device in stage.devices] for device in range(count)]
    shared = sum(len(stages) > 1 for stages in on)
    several = "both parts" if len(graph.parts()) == 2 else "several parts"
    each = f"{shared} with a rank of {several}, {count - shared} with one rank" if shared else "one rank each"
    lines = [f"devices        {count}: {each}"]
    found = expected.forecast
    for name, own in found.memory.items() if found is not None else ():
        lines.append(f"{name + ' rank':14} {_breakdown(own.peak)}")
    if found is not None:
        lines.append(f"fullest device {_breakdown(found.peak)}")
    else:
        most = max(sum(states[stage.name].total for stage in stages) for stages in on)
        lines.append(f"fullest device {binary_size(most)} of states; what a step takes besides is not known")
    host = {name: one.host for name, one in states.items() if one.host}
    return [*lines, *(f"host memory    {binary_size(held)} of moments a {name} rank" for name, held in host.items())]


def _pipeline(plan: RunPlan, expected: Expected) -> list[str]:
    """The stages of a pipeline, why they are cut so, its clock table, and who waits, where there are several."""
    config, graph = plan.config, plan.graph
    cut = {part: graph.of_part(part) for part in graph.parts() if len(graph.of_part(part)) > 1}
    if not cut:
        return []
    count, most = micro_batches(config), max(map(len, cut.values()))
    shown = min(count, CLOCK_MICRO_BATCHES - CLOCK_MICRO_BATCHES % most or most)
    again = {s.name for s in graph.stages if set(stage_choices(_recompute(config, s), graph, s)) != {"none"}}
    table = draw(make_schedule(config.training.schedule, graph, shown), graph, again).splitlines()
    question, found = expected.question, expected.forecast
    drawn = play_step(question, found.stages, shown) if question is not None and found is not None else None
    note = "" if shown == count else f", of {shown} of its {count} micro-batches"
    return [
        *(f"{part + ' layers':14} {'; '.join(map(_layers, stages))}" for part, stages in cut.items()),
        *_why(plan, cut),
        f"schedule       {config.training.schedule}{note} (columns: time, ' is backward, b the second run of layers"
        + (', " backward of layers that go forward again' if again else "")
        + "):",
        *(f"  {line}" for line in table),
        *(timeline_lines(drawn, graph, again) if drawn is not None else []),
        *(bubble_lines(found.timeline) if found is not None else []),
    ]


def _recompute(config: Config, stage: StageSpec) -> str:
    return resolved(parts(config)[stage.part].recompute)


def _why(plan: RunPlan, cut: Iterable[str]) -> list[str]:
    """A line for each part with several stages, or one where they are cut together: which method cuts are from, and
    what is known of them."""
    chosen = part_cuts(plan.config, plan.counted)
    why = {name: chosen[name].why if name in chosen else f"as {name}.cuts has them" for name in cut}
    if is_joint(plan.config):
        return [f"{'cuts':14} {said}" for said in dict.fromkeys(why.values())]
    return [f"{name + ' cuts':14} {said}" for name, said in why.items()]


def _layers(stage: StageSpec) -> str:
    return f"{stage.name} {', '.join(f'{run.start}-{run.stop - 1}' for run in stage.chunks)}"


def _breakdown(moment: Moment) -> str:
    """`34.1 GiB in the backward: weights 30.0 GiB, activations 2.1 GiB, …`, the largest first, none below a percent."""
    largest = sorted(moment.taken.items(), key=lambda one: -one[1])
    named = ", ".join(f"{what} {binary_size(count)}" for what, count in largest if count >= _NAMED * moment.total)
    return f"{binary_size(moment.total)} in the {moment.name}: {named}"


def require_room(plan: RunPlan, memory: int | None) -> None:
    """Raise ConfigError where the stages on one GPU keep more than its `memory` bytes; None: not known.

    Weights, gradients, the optimizer and contexts alone count, which a run cannot do without. What a step takes besides
    is for the planner, or for CUDA to say."""
    if memory is None:
        return
    sections, cuda, graph = parts(plan.config), plan.config.cluster.device != "cpu", plan.graph
    kept = {
        stage.name: rank_bytes(sections[stage.part], stage, shape_of(plan, stage)).total + cuda * runtime_bytes(stage)
        for stage in graph.stages
    }
    for device in range(graph.device_count()):
        _require({stage.name: kept[stage.name] for stage in graph.stages if device in stage.devices}, memory)


def _require(kept: dict[str, int], memory: int) -> None:
    if sum(kept.values()) <= memory:
        return
    each = ", ".join(f"{name} {binary_size(count)}" for name, count in kept.items())
    apart = " Or give each stage GPUs of its own (cluster.collocate=false)." if len(kept) > 1 else ""
    raise ConfigError(
        f"the stages on one GPU keep {binary_size(sum(kept.values()))} between steps ({each}: weights, gradients, "
        f"optimizer and CUDA's contexts), and it has {binary_size(memory)}. Cut them over more actors "
        "(text.num_actors, text.zero_stage=3, text.tensor), or train less (text.lora.rank, training.frozen)."
        f"{apart} What each choice takes: training.dry_run=true"
    )


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
    lines = [f"bubble         {timeline.bubble:.0%} of the devices' time ({each})"]
    waits = [
        f"{stage} {seconds / timeline.step_s:.0%} for {other}"
        for stage, of_stage in timeline.waits().items()
        for other, seconds in sorted(of_stage.items(), key=lambda one: -one[1])
        if seconds >= _LEAST * timeline.step_s
    ]
    return [*lines, f"waiting        {', '.join(waits)}"] if waits else lines
