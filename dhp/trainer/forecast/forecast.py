"""A run's step and memory before it starts: the schedule played in seconds, and the fullest moment of each device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from dhp.config.parts import DECODER, encoders, parts, resolved
from dhp.config.recompute import read_choices
from dhp.config.resolve import micro_batches
from dhp.core.errors import ConfigError
from dhp.core.graph import HIDDEN_STATES, Edge, StageSpec
from dhp.core.reports import RecomputePolicies
from dhp.models.family import VISION
from dhp.models.shape import PartShape, sum_shape
from dhp.models.types import chunks_of
from dhp.parallel.tensor.loss import CHUNK_ROWS
from dhp.planner.costs import Arrangement, StageCosts
from dhp.planner.rates import Work
from dhp.planner.search import filled_plan
from dhp.step.schedule import Action, Forward, Schedule, make_schedule
from dhp.step.timed import Timeline, play
from dhp.trainer.forecast.counted import Counted, Cut, stage_parameters
from dhp.trainer.forecast.loads import RunLoads, text_rows, tower_rows
from dhp.trainer.forecast.machine import Machine
from dhp.trainer.forecast.memory import Moment, Passing, StageMemory, device_peak, stage_memory
from dhp.trainer.forecast.seconds import KINDS, StageSeconds, UnitSeconds, once_a_step, stage_seconds, unit_seconds
from dhp.trainer.memory import VALUE_BYTES, Units, sum_bytes
from dhp.trainer.plan import RunPlan
from dhp.trainer.recompute import arrange
from dhp.trainer.row_bytes import CHOICES
from dhp.trainer.tower_units import tower_width
from dhp.trainer.units import hidden_width

if TYPE_CHECKING:
    from dhp.engine.traced import TracedRows

MOST_MICRO_BATCHES = 64  # of a step that is played


@dataclass(frozen=True)
class Forecast:
    """Of one layout. timeline: of one step, of at most `MOST_MICRO_BATCHES` micro-batches. step_s: of a mean step, all
    that a run takes for it.

    stages: seconds by stage; memory: by stage; peak: of the fullest device, and the stages there. recompute: what each
    stage's layers recompute. loads: what it is for.
    """

    step_s: float
    timeline: Timeline
    stages: Mapping[str, StageSeconds]
    memory: Mapping[str, StageMemory]
    peak: Moment
    fullest: tuple[str, ...]
    recompute: Mapping[str, RecomputePolicies]
    loads: RunLoads
    micro_batches: int
    fixed_s: float

    @property
    def tokens_s(self) -> float:
        """Tokens a second, of all replicas."""
        return self.loads.step_tokens / self.step_s

    @property
    def busy_s(self) -> dict[str, float]:
        """Seconds of a step that each stage's devices work for it."""
        return {name: self.micro_batches * one.micro_batch_s + one.once_s for name, one in self.stages.items()}

    def kinds(self) -> dict[str, float]:
        """Seconds of a step by kind of work, of the stage of each part that works most, `bubble` and `driver` besides:
        in sum the step, where parts take turns."""
        found = dict.fromkeys(KINDS, 0.0)
        busiest: dict[str, str] = {}
        for name in self.stages:
            part, busy = name.partition(".")[0], self.busy_s
            if part not in busiest or busy[name] > busy[busiest[part]]:
                busiest[part] = name
        for name in busiest.values():
            for kind, seconds in self.stages[name].kinds.items():
                found[kind] += seconds * (1 if kind in ("update", "sync") else self.micro_batches)
        left = self.step_s - self.fixed_s - sum(found.values())
        return {**found, "bubble": left, "driver": self.fixed_s}


@dataclass(frozen=True)
class Question:
    """What a forecast is made from. plan: of the run. machine: that it is for."""

    plan: RunPlan
    counted: Counted
    machine: Machine
    loads: RunLoads

    @cached_property
    def schedule(self) -> Schedule:
        return make_schedule(self.plan.config.training.schedule, self.plan.graph, micro_batches(self.plan.config))

    @cached_property
    def arrangement(self) -> Arrangement:
        return arrange(self.plan.graph, self.schedule, "cuda" if self.machine.contexts else "cpu")


def count_model(plan: RunPlan) -> Counted:
    """What is counted of a run's model, kept in the folder of lengths."""
    folder = plan.config.data.cache_dir
    objective = plan.config.training.objective
    return Counted(
        plan.family, plan.source, plan.rules, plan.adapters, objective, None if folder is None else Path(folder)
    )


def forecast(asked: Question) -> Forecast:
    """Raises ModelError where a part's costs are not known, ConfigError where its number format has no rates."""
    plan, machine = asked.plan, asked.machine
    if others := [name for name in encoders(plan.config) if name != VISION]:
        raise ConfigError(
            f"seconds and activations of the {', '.join(others)} part are not known before it runs. Plan the run "
            "without it, or measure it: memory.accounting=true"
        )
    costs = {stage.name: _costs(asked, stage) for stage in plan.graph.stages}
    units = {name: _units(asked, name) for name in plan.graph.parts()}
    recompute = _choose(asked, costs, units)
    memory = {stage.name: _memory(asked, stage, costs[stage.name], recompute) for stage in plan.graph.stages}
    seconds = {stage.name: _seconds(asked, stage, units[stage.part], recompute, memory) for stage in plan.graph.stages}
    timeline = _play(asked, seconds)
    count, played = micro_batches(plan.config), _played(asked)
    grown = timeline.step_s + (count - played) * _slowest(asked, seconds)
    once = max(sum(seconds[s.name].once_s for s in _on(plan, device)) for device in range(plan.graph.device_count()))
    fixed = machine.step_s + machine.action_s * _actions(asked)
    peak, fullest = _peak(asked, memory)
    return Forecast(
        grown + once + fixed, timeline, seconds, memory, peak, fullest, recompute, asked.loads, count, fixed
    )


def _on(plan: RunPlan, device: int) -> list[StageSpec]:
    return [stage for stage in plan.graph.stages if device in stage.devices]


def _units(asked: Question, name: str) -> tuple[UnitSeconds, ...]:
    plan = asked.plan
    section = parts(plan.config)[name]
    degrees = plan.graph.of_part(name)[0].degrees
    return unit_seconds(asked.counted, name, section, degrees, asked.loads, asked.machine.of(name, section.dtype))


def _costs(asked: Question, stage: StageSpec) -> StageCosts | None:
    """What its layers keep of its largest micro-batch; None where no backward goes through it."""
    plan = asked.plan
    if not any(map(plan.graph.goes_back, stage.nodes)):
        return None
    kept = asked.counted.keeps(stage.part, Cut.of(parts(plan.config)[stage.part]))
    return kept.costs(_rows(asked, stage), stage.layers)


def _choose(
    asked: Question, costs: Mapping[str, StageCosts | None], units: Mapping[str, tuple[UnitSeconds, ...]]
) -> dict[str, RecomputePolicies]:
    """What layers recompute: as the configuration has it; with auto as little as the budget, or the device, has room
    for."""
    plan, found = asked.plan, {}
    count = micro_batches(plan.config)
    automatic: dict[str, StageCosts] = {}
    for stage in plan.graph.stages:
        written, known = resolved(parts(plan.config)[stage.part].recompute), costs[stage.name]
        layers = len(plan.family.parts[stage.part].layers.kinds)
        choices = read_choices(written, layers) if written != "auto" else ("all",) * layers
        found[stage.name] = tuple(choices[at] for at in stage.layers) if known else ("none",) * len(stage.layers)
        if written == "auto" and known is not None:
            automatic[stage.name] = _with_seconds(known, stage, units[stage.part], count)
    if not automatic:
        return found
    everything = {name: automatic.get(name, known) for name, known in costs.items() if known is not None}
    budget = _budget(asked, costs, found)
    best = filled_plan(everything, found, frozenset(automatic), asked.arrangement, budget)
    return {**found, **best}


def _with_seconds(costs: StageCosts, stage: StageSpec, units: tuple[UnitSeconds, ...], count: int) -> StageCosts:
    """With the seconds that a step recomputes."""
    layers = {
        kind: {c: replace(own[c], replay_s=count * units[int(kind) + 1].again_s(c)) for c in CHOICES if c in own}
        for kind, own in costs.layers.items()
    }
    return replace(costs, layers=layers)


def _budget(asked: Question, costs: Mapping[str, StageCosts | None], all_of: Mapping[str, RecomputePolicies]) -> float:
    """Bytes that activations may take on the fullest device."""
    given = asked.plan.config.memory.budget_gib
    if given is not None:
        return given * 2**30
    plan = asked.plan
    memory = {stage.name: _memory(asked, stage, costs[stage.name], all_of) for stage in plan.graph.stages}
    kept = [
        sum(sum(memory[s.name].idle.values()) + _others(memory[s.name]) for s in _on(plan, device))
        for device in range(plan.graph.device_count())
    ]
    return max(0.0, asked.machine.limit_bytes - max(kept))


def _others(memory: StageMemory) -> float:
    """The most of what comes and goes beside activations."""
    return max(
        one.taken.get("loss", 0.0) + one.taken.get("gathered", 0.0) + one.taken.get("inside", 0.0)
        for one in memory.others
    )


def _memory(
    asked: Question, stage: StageSpec, costs: StageCosts | None, recompute: Mapping[str, RecomputePolicies]
) -> StageMemory:
    plan = asked.plan
    section = parts(plan.config)[stage.part]
    kept = asked.counted.keeps(stage.part, Cut.of(section))
    own = asked.counted.unit_parameters(stage.part, Cut.of(section))
    before, behind = own[0] * (0 in stage.layers), own[-1] * (len(own) - 3 in stage.layers)
    passing = Passing(
        costs,
        recompute[stage.name],
        kept.inside(_of_one_chunk(_rows(asked, stage)), stage.layers, recompute[stage.name]),
        asked.arrangement.holding[stage.name][stage.name],
        micro_batches(plan.config),
        _handed(asked, stage),
        _flown(asked, stage),
        _more_targets(asked, stage),
        Units(max(own[at + 1] for at in stage.layers), before + behind, behind),
        _grown(asked, stage),
    )
    return stage_memory(section, stage, _shape(asked, stage), passing, asked.machine.contexts)


def _rows(asked: Question, stage: StageSpec) -> TracedRows:
    """Of its largest micro-batch."""
    return (text_rows if stage.part == DECODER else tower_rows)(asked.loads.worst, stage.degrees)


def _of_one_chunk(rows: TracedRows) -> TracedRows:
    """With as many targets as the loss takes at once."""
    return replace(rows, targets=min(rows.targets, CHUNK_ROWS))


def _handed(asked: Question, stage: StageSpec) -> float:
    """Bytes of gradients that a rank receives and hands on, and of those with which its backward begins, beyond what
    is inside its layers' passes; with tensor parallelism also a copy of the one that ranks sum."""
    if not any(map(asked.plan.graph.goes_back, stage.nodes)):
        return 0.0
    section, rows = parts(asked.plan.config)[stage.part], _rows(asked, stage)
    size, width = VALUE_BYTES[section.dtype], hidden_width(asked.plan.family)
    if stage.part == DECODER:
        states = rows.tokens * width * size
        between = (0 not in stage.layers) + 2 * (len(asked.counted.sizes.layers) - 1 not in stage.layers)
        return float(states * (between + (stage.degrees.tensor > 1)))
    outputs = [edge for node in stage.nodes for edge in asked.plan.graph.outputs(node)]
    family, patches = asked.plan.family, _rows(asked, stage).patches
    features = patches / family.tower.merge_unit * hidden_width(family)
    each = [
        patches * tower_width(family) if edge.tensors == (HIDDEN_STATES,) else features * len(edge.tensors)
        for edge in outputs
    ]
    copied = patches * tower_width(family) * ((stage.degrees.tensor > 1) + (0 not in stage.layers))
    return size * (2 * sum(each) + copied)


def _flown(asked: Question, stage: StageSpec) -> float:
    """Bytes of what one micro-batch received and will have handed on, which autograd need not keep."""
    section, rows, family = parts(asked.plan.config)[stage.part], _rows(asked, stage), asked.plan.family
    width, sent = hidden_width(family), [e for node in stage.nodes for e in asked.plan.graph.outputs(node)]
    numbers: float
    if stage.part == DECODER:
        numbers = rows.tokens * width * bool(sent) + rows.features * width * (0 in stage.layers)
    else:
        numbers = rows.patches / family.tower.merge_unit * width * sum(e.tensors != (HIDDEN_STATES,) for e in sent)
    return float(numbers * VALUE_BYTES[section.dtype])


def _more_targets(asked: Question, stage: StageSpec) -> float:
    """Bytes that the loss has beyond those of one chunk of targets: their states and gradients, and a chunk's gradient
    of the head beside the exact sum of those before it."""
    section, part = parts(asked.plan.config)[stage.part], asked.plan.family.parts[stage.part]
    head = part.head_shape(chunks_of(stage.chunks, part.whole))
    more = text_rows(asked.loads.worst, stage.degrees).targets - CHUNK_ROWS
    if stage.part != DECODER or more <= 0 or head is None or not head.loss:
        return 0.0
    size, exact = VALUE_BYTES[section.dtype], max(VALUE_BYTES[section.dtype], VALUE_BYTES["float32"])
    matrix = -(-head.vocabulary // stage.degrees.tensor) * head.hidden
    return float(2 * more * head.hidden * size + matrix * (2 * exact - size))


def _grown(asked: Question, stage: StageSpec) -> tuple[float, ...] | None:
    """Bytes of gradients where autograd accumulates them, as backward goes; None where all have their room before it
    begins: in buckets that are summed, or in another format."""
    section = parts(asked.plan.config)[stage.part]
    if section.zero_stage or stage.degrees.shards > 1 or VALUE_BYTES[section.dtype] != sum_bytes(section):
        return None
    trained = asked.counted.unit_parameters(stage.part, Cut.of(section), trained=True)
    units = [trained[at + 1] for at in reversed(stage.layers)]
    last = len(trained) - 2
    after = trained[-1] if last - 1 in stage.layers else 0
    found, values = [0, after], after
    for unit in units:
        values += unit
        found.append(values)
    return tuple(float(VALUE_BYTES[section.dtype] * count) for count in found)


def _shape(asked: Question, stage: StageSpec) -> PartShape:
    plan, part = asked.plan, asked.plan.family.parts[stage.part]
    held = asked.counted.held(stage.part, Cut.of(parts(plan.config)[stage.part]))
    absent = part.absent(chunks_of(stage.chunks, part.whole))
    return sum_shape(stage_parameters(held, absent), bool(plan.rules.selects or plan.family.idle))


def _seconds(
    asked: Question,
    stage: StageSpec,
    units: tuple[UnitSeconds, ...],
    recompute: Mapping[str, RecomputePolicies],
    memory: Mapping[str, StageMemory],
) -> StageSeconds:
    section = parts(asked.plan.config)[stage.part]
    begins = _backward_from(asked, stage)
    behind = Work()
    for at in stage.layers if begins is not None else ():
        behind = behind + units[at + 1].passes.backward
    once = once_a_step(
        section,
        stage.degrees,
        _shape(asked, stage),
        memory[stage.name].states,
        replace(behind, hidden=()),
        asked.machine.of(stage.part, section.dtype),
    )
    return stage_seconds(units, stage.chunks, recompute[stage.name], begins, once if stage.trains else (0.0, 0.0))


def _backward_from(asked: Question, stage: StageSpec) -> int | None:
    """The first unit of the part through which a backward goes, by its place."""
    if not any(map(asked.plan.graph.goes_back, stage.nodes)):
        return None
    counted = asked.counted
    if stage.part == DECODER:
        shares = counted.trained
        if shares is None or counted.trains_before or shares.get(None, 0.0):
            return 0
        return next((at + 1 for at in range(len(counted.sizes.layers)) if shares.get(at, 0.0)), None)
    return next((at for at, piece in enumerate(counted.pieces) if piece.trained), None)


def _played(asked: Question) -> int:
    """As many micro-batches as are played, in whole groups of the decoder's stages."""
    stages, count = len(asked.plan.graph.of_part(DECODER)), micro_batches(asked.plan.config)
    return min(count, MOST_MICRO_BATCHES - MOST_MICRO_BATCHES % stages or stages)


def _slowest(asked: Question, seconds: Mapping[str, StageSeconds]) -> float:
    """Of a further micro-batch: what the device with most work takes for it."""
    plan = asked.plan
    return max(
        sum(seconds[s.name].micro_batch_s for s in _on(plan, device)) for device in range(plan.graph.device_count())
    )


def _actions(asked: Question) -> int:
    """Of the schedule, on the device that has most of them."""
    plan = asked.plan
    own = [sum(len(s.nodes) * 2 for s in _on(plan, device)) for device in range(plan.graph.device_count())]
    return max(own) * micro_batches(plan.config)


def _play(asked: Question, seconds: Mapping[str, StageSeconds]) -> Timeline:
    plan, graph = asked.plan, asked.plan.graph
    schedule = make_schedule(plan.config.training.schedule, graph, _played(asked))
    programs = {stage.name: [a for a in schedule if a.node.stage == stage.name] for stage in graph.stages}

    def of(action: Action) -> float:
        own = seconds[action.node.stage]
        return (own.forward_s if isinstance(action, Forward) else own.backward_s)[action.node.chunk]

    return play(programs, graph, of, _hop(asked))


def _hop(asked: Question) -> Callable[[Edge, bool], float]:
    """Seconds of a hand-over between two stages: what one rank sends."""
    plan, loads, hand = asked.plan, asked.loads, asked.machine.handover
    sections = parts(plan.config)

    def hop(edge: Edge, back: bool) -> float:
        source, target = (plan.graph.stage(node.stage) for node in (edge.source, edge.target))
        value = VALUE_BYTES[sections[source.part].dtype]
        if source.part == DECODER:
            rows = loads.text.tokens / source.degrees.sequence * hidden_width(plan.family)
        elif target.part == DECODER:
            rows = loads.pictures.features / source.degrees.shards * hidden_width(plan.family) * len(edge.tensors)
        else:
            rows = loads.pictures.patches / source.degrees.shards * tower_width(plan.family)
        return hand.latency_s + rows * value / hand.bytes_s

    return hop


def _peak(asked: Question, memory: Mapping[str, StageMemory]) -> tuple[Moment, tuple[str, ...]]:
    plan, arrangement = asked.plan, asked.arrangement
    found = {
        stages: device_peak(
            {name: memory[name] for name in memory if name in stages}, arrangement.together, arrangement.holding
        )
        for stages in arrangement.sharing
    }
    fullest = max(found, key=lambda stages: found[stages].total)
    return found[fullest], tuple(stage.name for stage in plan.graph.stages if stage.name in fullest)
