"""Forecasts a run's step and memory by its schedule."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from dhp.config.layout import read_choices
from dhp.config.parts import DECODER, encoders, parts, resolved
from dhp.config.steps import micro_batches
from dhp.core.errors import ConfigError
from dhp.core.graph import Edge, StageSpec
from dhp.core.reports import RecomputePolicies
from dhp.models.family import VISION
from dhp.plan.count.costs import StageCosts
from dhp.plan.count.counted_model import Cut
from dhp.plan.count.loads import RunLoads
from dhp.plan.count.rates import Operations
from dhp.plan.count.row_bytes import CHOICES
from dhp.plan.count.seconds import KINDS, StageSeconds, UnitSeconds, once_a_step, stage_seconds, unit_seconds
from dhp.plan.count.state_bytes import VALUE_BYTES
from dhp.plan.count.unit_work import hidden_width, tower_width
from dhp.plan.forecast.moments import Moment, StageMemory, fullest_device, memory_of, rows_of_stage, shape_of
from dhp.plan.recompute.best_plan import filled_plan
from dhp.plan.run_plan import Question, RunPlan
from dhp.step.schedule import Action, Forward, make_schedule
from dhp.step.timed import Timeline, play

MOST_MICRO_BATCHES = 64  # of a step that is played


def count_played(asked: Question, most: int = MOST_MICRO_BATCHES) -> int:
    """As many micro-batches as are played, in whole groups of the decoder's stages."""
    stages, count = len(asked.plan.graph.of_part(DECODER)), micro_batches(asked.plan.config)
    return min(count, most - most % stages or stages)


def slowest_micro_batch(asked: Question, seconds: Mapping[str, StageSeconds]) -> float:
    """Of a further micro-batch: what the device with most work takes for it."""
    plan, count = asked.plan, micro_batches(asked.plan.config)
    return max(
        sum(seconds[s.name].micro_batch_s * asked.passes(s.part) / count for s in stages_on(plan, device))
        for device in range(plan.graph.device_count())
    )


def count_actions(asked: Question) -> int:
    """Of the schedule, on the device that has most of them."""
    plan = asked.plan
    return max(
        sum(len(s.nodes) * 2 * asked.passes(s.part) for s in stages_on(plan, device))
        for device in range(plan.graph.device_count())
    )


def play_step(asked: Question, seconds: Mapping[str, StageSeconds], most: int = MOST_MICRO_BATCHES) -> Timeline:
    """A step of as many micro-batches as are played."""
    plan, graph = asked.plan, asked.plan.graph
    count, played = micro_batches(plan.config), count_played(asked, most)
    schedule = make_schedule(plan.config.training.schedule, graph, played)
    programs = {stage.name: [a for a in schedule if a.node.stage == stage.name] for stage in graph.stages}

    def of(action: Action) -> float:
        own, part = seconds[action.node.stage], graph.stage(action.node.stage).part
        batch = graph.batch_of(part)
        size = min(batch, played - action.micro_batch * batch) * asked.passes(part) / count  # to a mean pass
        return size * (own.forward_s if isinstance(action, Forward) else own.backward_s)[action.node.chunk]

    return play(programs, graph, of, _hop(asked))


def _hop(asked: Question) -> Callable[[Edge, bool], float]:
    """Seconds of a hand-over between two stages: what one rank sends."""
    plan, loads, hand = asked.plan, asked.loads, asked.machine.channel(asked.plan.graph.gradients_merge)
    sections = parts(plan.config)

    def hop(edge: Edge, back: bool) -> float:
        source, target = (plan.graph.stage(node.stage) for node in (edge.source, edge.target))
        value = VALUE_BYTES[sections[source.part].dtype]
        if source.part == DECODER:
            rows = loads.text.tokens / source.degrees.sequence * hidden_width(plan.family)
        elif target.part == DECODER:
            rows = loads.pictures.features / source.degrees.shards * hidden_width(plan.family) * len(edge.tensors)
        else:
            rows = loads.passed.patches / source.degrees.shards * tower_width(plan.family)
        return hand.latency_s + rows * value / hand.bytes_s

    return hop


def stages_on(plan: RunPlan, device: int) -> list[StageSpec]:
    """Stages with a rank on a device."""
    return [stage for stage in plan.graph.stages if device in stage.devices]


@dataclass(frozen=True)
class Forecast:
    """Of one layout. timeline: of one step, of at most `MOST_MICRO_BATCHES` micro-batches. step_s: of a mean step, all
    that a run takes for it.

    stages: seconds by stage; memory: by stage; peak: of the fullest device, and the stages there. recompute: what each
    stage's layers recompute. loads: what it is for. passes: micro-batches of a step by stage, as it counts its own."""

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
    passes: Mapping[str, int]

    @property
    def tokens_s(self) -> float:
        """Tokens a second, of all replicas."""
        return self.loads.step_tokens / self.step_s

    @property
    def busy_s(self) -> dict[str, float]:
        """Seconds of a step that each stage's devices work for it."""
        return {name: self.passes[name] * one.micro_batch_s + one.once_s for name, one in self.stages.items()}

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
                found[kind] += seconds * (1 if kind in ("update", "sync") else self.passes[name])
        left = self.step_s - self.fixed_s - sum(found.values())
        return {**found, "bubble": left, "driver": self.fixed_s}


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
    memory = {stage.name: memory_of(asked, stage, costs[stage.name], recompute) for stage in plan.graph.stages}
    seconds = {stage.name: _seconds(asked, stage, units[stage.part], recompute, memory) for stage in plan.graph.stages}
    timeline = play_step(asked, seconds)
    count, played = micro_batches(plan.config), count_played(asked)
    grown = timeline.step_s + (count - played) * slowest_micro_batch(asked, seconds)
    once = max(
        sum(seconds[s.name].once_s for s in stages_on(plan, device)) for device in range(plan.graph.device_count())
    )
    fixed = machine.step_s + machine.action_s * count_actions(asked)
    passes = {stage.name: asked.passes(stage.part) for stage in plan.graph.stages}
    peak, fullest = fullest_device(asked, memory)
    step_s = grown + once + fixed
    return Forecast(step_s, timeline, seconds, memory, peak, fullest, recompute, asked.loads, count, fixed, passes)


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
    return kept.costs(rows_of_stage(asked, stage), stage.layers)


def _choose(
    asked: Question, costs: Mapping[str, StageCosts | None], units: Mapping[str, tuple[UnitSeconds, ...]]
) -> dict[str, RecomputePolicies]:
    """What layers recompute: as the configuration has it; with auto as little as the budget, or the device, has room
    for."""
    plan, found = asked.plan, {}
    automatic: dict[str, StageCosts] = {}
    for stage in plan.graph.stages:
        written, known = resolved(parts(plan.config)[stage.part].recompute), costs[stage.name]
        layers = len(plan.family.parts[stage.part].layers.kinds)
        choices = read_choices(written, layers) if written != "auto" else ("all",) * layers
        found[stage.name] = tuple(choices[at] for at in stage.layers) if known else ("none",) * len(stage.layers)
        if written == "auto" and known is not None:
            automatic[stage.name] = _with_seconds(known, stage, units[stage.part], asked.passes(stage.part))
    if not automatic:
        return found
    everything = {name: automatic.get(name, known) for name, known in costs.items() if known is not None}
    budget = _budget(asked, costs, found)
    best = filled_plan(everything, found, frozenset(automatic), asked.arrangement, budget)
    return {**found, **best}


def _with_seconds(costs: StageCosts, stage: StageSpec, units: tuple[UnitSeconds, ...], count: int) -> StageCosts:
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
    memory = {stage.name: memory_of(asked, stage, costs[stage.name], all_of) for stage in plan.graph.stages}
    kept = [
        sum(sum(memory[s.name].idle.values()) + _others(memory[s.name]) for s in stages_on(plan, device))
        for device in range(plan.graph.device_count())
    ]
    return max(0.0, asked.machine.sure_bytes - max(kept))


def _others(memory: StageMemory) -> float:
    """The most of what comes and goes beside activations."""
    return max(
        one.taken.get("loss", 0.0) + one.taken.get("gathered", 0.0) + one.taken.get("inside", 0.0)
        for one in memory.others
    )


def _seconds(
    asked: Question,
    stage: StageSpec,
    units: tuple[UnitSeconds, ...],
    recompute: Mapping[str, RecomputePolicies],
    memory: Mapping[str, StageMemory],
) -> StageSeconds:
    section = parts(asked.plan.config)[stage.part]
    begins = _backward_from(asked, stage)
    behind = Operations()
    for at in stage.layers if begins is not None else ():
        behind = behind + units[at + 1].passes.backward
    once = once_a_step(
        section,
        stage.degrees,
        shape_of(asked.plan, stage),
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
