"""Estimates of a run from the model's shape alone: layout, parameters and bytes of each rank, micro-batches."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from dhp.config.parts import DECODER, decoder, model_name, parts, resolved
from dhp.config.resolve import micro_batches
from dhp.config.schema import Config, PartConfig
from dhp.core.errors import ConfigError
from dhp.core.graph import StageGraph, StageSpec
from dhp.core.parameters import EXACT_STATES
from dhp.core.text import aligned
from dhp.data.balance.packs import Loads
from dhp.data.remote.places import missing_data
from dhp.models.pretrained import config_source
from dhp.models.shape import PartShape
from dhp.models.types import chunks_of
from dhp.plan.count.counted_model import stage_shapes
from dhp.plan.count.decoder_units import assumed_rows
from dhp.plan.count.row_limits import unreached
from dhp.plan.count.state_bytes import Footprint, RankBytes, by_zero_stage, copied_bytes, footprint, rank_bytes
from dhp.plan.cut.chain import Model, is_joint, part_cuts
from dhp.plan.model_shapes import ModelShapes
from dhp.plan.run_plan import RunPlan, plan_run
from dhp.plan.search.free_keys import a_step, rows_by_tokens
from dhp.plan.search.verdict import verdict
from dhp.plan.stage_graph import stage_choices
from dhp.step.schedule import draw, make_schedule
from dhp.trainer.activations import Activations, expected_activations
from dhp.trainer.expected_step import bubble_lines, expected_step, timeline_lines
from dhp.trainer.settings import FULLEST_FIRST, table_of_training

CLOCK_MICRO_BATCHES = 8  # of a step that the clock table shows at most

_HEADINGS = ("stage", "layout", "ranks", "parameters", "a rank", "of these whole", "weights", "gradients", "optimizer")


def dry_run(config: Config) -> str:
    """The table and notes to print. `config` has been through `dhp.trainer.preflight.prepare`. Writes nothing."""
    name = model_name(config)
    plan = plan_run(config, config_source(name))
    source, graph = plan.source, plan.graph
    shapes = stage_shapes(plan)
    memory = footprints(plan, shapes)
    rows = [_row(config, stage, shapes[stage.name], memory[stage.name].states) for stage in graph.stages]
    lines = [f"dry run of {config.name}", f"model          {name}"]
    if source != name:
        lines.append(f"its shape      {source}")
    lines += [
        "",
        *aligned([_HEADINGS, *rows], left=2),
        "",
        *_zero_stages(config, graph, shapes),
        "",
        *_devices(graph, memory, expected_activations(plan)),
        "",
        *table_of_training(plan),
        "",
    ]
    lines += _pipeline(plan)
    training = config.training
    assumed = assumed_rows(config)
    lines.append(f"assumed        micro-batches of {assumed}; seconds as operations")
    alike = Loads(np.array([assumed.pictures]), np.array([assumed.tokens]))
    lines += [f"data           {line}" for line in unreached(config, alike)]
    each = "rows" if rows_by_tokens(config) else "samples"
    times = "" if each == "rows" else f"micro_batch_size {training.micro_batch_size} × "
    lines.append(
        f"a step         {a_step(config)} {each} = {DECODER}.data {decoder(config).data} × {times}"
        f"{micro_batches(config)} micro-batches"
    )
    if training.save_in_background:
        sections = parts(config)
        kept = {one.name: copied_bytes(sections[one.part], one, shapes[one.name]) for one in graph.stages}
        each = ", ".join(f"{gigabytes(held)} a {name} rank" for name, held in kept.items())
        lines.append(f"checkpoints    copied to host memory and written behind steps: {each} at most")
    if config.data.fullest_first:
        lines.append(f"data           {FULLEST_FIRST}")
    missing = missing_data(config)
    lines += [f"data           {message}" for message in missing]
    passed = "every check but these of the data passed" if missing else "every check passed"
    return "\n".join([*lines, *verdict(plan), "", f"{passed}; nothing was started"])


def footprints(plan: RunPlan, shapes: dict[str, PartShape]) -> dict[str, Footprint]:
    """The footprint of a rank of each stage, by stage."""
    sections, cuda = parts(plan.config), plan.config.cluster.device != "cpu"
    found = {}
    for stage in plan.graph.stages:
        part = plan.family.parts[stage.part]
        head = part.head_shape(chunks_of(stage.chunks, part.whole))
        found[stage.name] = footprint(sections[stage.part], stage, shapes[stage.name], head, cuda)
    return found


def _zero_stages(config: Config, graph: StageGraph, shapes: dict[str, PartShape]) -> list[str]:
    """What weights, gradients and optimizer of a rank would take under each ZeRO stage; the chosen one in brackets."""
    rows = [("states of a rank", *(f"zero_stage {stage}" for stage in range(4)))]
    for stage in graph.stages:
        part, shape = getattr(config, stage.part), shapes[stage.name]
        sizes = by_zero_stage(part, stage, shape)
        found = {zero: "-" if held is None else gigabytes(held) for zero, held in sizes.items()}
        found[part.zero_stage] = f"[{gigabytes(rank_bytes(part, stage, shape).total)}]"
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
    return (stage.name, layout, str(stage.degrees.world), *(f"{n:,}" for n in counts), *map(gigabytes, held))


def _devices(graph: StageGraph, memory: dict[str, Footprint], activations: Activations) -> list[str]:
    """The number of devices, the ranks that share one, and the bytes of the fullest, without activations and with
    those of an assumed micro-batch."""
    count = graph.device_count()
    on = [[stage for stage in graph.stages if device in stage.devices] for device in range(count)]
    shared = sum(len(stages) > 1 for stages in on)
    several = "both parts" if len(graph.parts()) == 2 else "several parts"
    each = f"{shared} with a rank of {several}, {count - shared} with one rank" if shared else "one rank each"
    host = {name: one.states.host for name, one in memory.items()}
    without = {frozenset(stage.name for stage in stages): sum(memory[s.name].total for s in stages) for stages in on}
    full = max(own + activations.device_bytes(stages) for stages, own in without.items())
    return [
        f"devices        {count}: {each}",
        *(f"{name + ' rank':14} {_breakdown(m)}" for name, m in memory.items()),
        *(
            f"{name + ' keeps':14} {gigabytes(round(activations.stage_bytes(name)))} of activations"
            for name in activations.costs
        ),
        f"fullest device {gigabytes(max(without.values()))} without activations, {gigabytes(round(full))} with them",
        *(f"activations    not counted: {why}" for why in activations.unknown),
        *(f"host memory    {gigabytes(held)} of moments a {name} rank" for name, held in host.items() if held),
    ]


def _pipeline(plan: RunPlan) -> list[str]:
    """The stages of a pipeline, why they are cut so, its clock table, and who waits, where there are several."""
    config, graph = plan.config, plan.graph
    cut = {part: graph.of_part(part) for part in graph.parts() if len(graph.of_part(part)) > 1}
    if not cut:
        return []
    count, most = micro_batches(config), max(map(len, cut.values()))
    shown = min(count, CLOCK_MICRO_BATCHES - CLOCK_MICRO_BATCHES % most or most)
    again = {s.name for s in graph.stages if set(stage_choices(_recompute(config, s), graph, s)) != {"none"}}
    table = draw(make_schedule(config.training.schedule, graph, shown), graph, again).splitlines()
    step, drawn = expected_step(plan), expected_step(plan, shown)
    note = "" if shown == count else f", of {shown} of its {count} micro-batches"
    return [
        *(f"{part + ' layers':14} {'; '.join(map(_layers, stages))}" for part, stages in cut.items()),
        *_why(plan, cut),
        f"schedule       {config.training.schedule}{note} (columns: time, ' is backward, b the second run of layers"
        + (', " backward of layers that go forward again' if again else "")
        + "):",
        *(f"  {line}" for line in table),
        *(timeline_lines(drawn, graph, again) if drawn is not None else []),
        *(bubble_lines(step) if step is not None else []),
    ]


def _recompute(config: Config, stage: StageSpec) -> str:
    return resolved(parts(config)[stage.part].recompute)


def _why(plan: RunPlan, cut: Iterable[str]) -> list[str]:
    """A line for each part with several stages, or one where they are cut together: which method cuts are from, and
    what is known of them."""
    shapes = ModelShapes(plan.family, plan.source, plan.adapters)
    chosen = part_cuts(plan.config, Model(plan.family, plan.source, plan.rules, shapes))
    why = {name: chosen[name].why if name in chosen else f"as {name}.cuts has them" for name in cut}
    if is_joint(plan.config):
        return [f"{'cuts':14} {said}" for said in dict.fromkeys(why.values())]
    return [f"{name + ' cuts':14} {said}" for name, said in why.items()]


def _layers(stage: StageSpec) -> str:
    """`text.1 4-7, 12-15`."""
    return f"{stage.name} {', '.join(f'{run.start}-{run.stop - 1}' for run in stage.chunks)}"


def _breakdown(taken: Footprint) -> str:
    """`34.1 GB: states 30.0 GB, the loss 2.1 GB, …`."""
    parts = {
        "states": taken.states.total,
        "the loss's chunk": taken.loss,
        "gathered layers": taken.gathered,
        "context and communicators": taken.runtime,
    }
    named = ", ".join(f"{what} {gigabytes(count)}" for what, count in parts.items() if count)
    return f"{gigabytes(taken.total)}: {named}"


def gigabytes(count: int) -> str:
    """`26.7 GB` of 10⁹ bytes, or megabytes below one."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.3f} MB"


def require_room(plan: RunPlan, memory: int | None) -> None:
    """Raise ConfigError where the stages on one GPU keep more than its `memory` bytes; None: not known.

    Weights, gradients, the optimizer and contexts alone count, which a run cannot do without. What a step takes besides
    is for the planner, or for CUDA to say.
    """
    if memory is None:
        return
    taken, graph = footprints(plan, stage_shapes(plan)), plan.graph
    for device in range(graph.device_count()):
        _require({stage.name: taken[stage.name] for stage in graph.stages if device in stage.devices}, memory)


def _require(taken: dict[str, Footprint], memory: int) -> None:
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
