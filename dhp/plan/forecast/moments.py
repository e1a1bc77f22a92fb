"""Bytes of a rank at each moment of a step."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from itertools import accumulate

from dhp.config.layout import OFFLOAD
from dhp.config.parts import DECODER, parts
from dhp.config.schema import PartConfig
from dhp.core.batch import CHUNK_ROWS
from dhp.core.graph import HIDDEN_STATES, StageSpec
from dhp.core.reports import RecomputePolicies
from dhp.models.shape import PartShape, sum_shape
from dhp.models.types import chunks_of
from dhp.plan.count.costs import LayerCost, StageCosts
from dhp.plan.count.counted_model import Cut, stage_parameters
from dhp.plan.count.loads import text_rows, tower_rows
from dhp.plan.count.row_bytes import CHOICES, NONE, StageInsides, TracedRows
from dhp.plan.count.seconds import unit_seconds
from dhp.plan.count.state_bytes import (
    VALUE_BYTES,
    Gathered,
    RankBytes,
    Units,
    gathered_moments,
    keeps_gradients,
    rank_bytes,
    runtime_bytes,
    sum_bytes,
)
from dhp.plan.count.unit_work import hidden_width, tower_width
from dhp.plan.run_plan import Question, RunPlan

NAMES = (
    "weights", "optimizer", "gradients", "activations", "recomputed", "inside", "loss", "gathered", "handed",
    "contexts",
)  # fmt: skip
FORWARD, LOSS, BACKWARD, UPDATE = "forward", "loss", "backward", "update"


@dataclass(frozen=True)
class Moment:
    """Bytes by what they are for (`NAMES`)."""

    name: str
    taken: Mapping[str, float]

    @property
    def total(self) -> float:
        return sum(self.taken.values())


@dataclass(frozen=True)
class StageMemory:
    """Of the fullest rank of a stage. peak: its fullest moment; others: of each kind of moment, its fullest.

    idle: what it holds while another stage on its device works, but activations; held_bytes: activations of one
    micro-batch; holds: micro-batches that it holds at most. activations: the most that autograd keeps at any moment."""

    states: RankBytes
    peak: Moment
    others: tuple[Moment, ...]
    idle: Mapping[str, float]
    held_bytes: float
    holds: float
    activations: float


@dataclass(frozen=True)
class Passing:
    """What a stage has besides its states. costs: what its layers keep of a micro-batch; None: no backward goes through
    it. choices: of its layers. inside: what comes and goes.

    holds: micro-batches that it holds at most; micro_batches: of a step. handed: bytes of gradients that are received,
    and of those that enter backward. flown: of what a micro-batch under way keeps of what was and is handed over, and
    autograd does not. more_targets: that the loss takes beyond what `inside` has, where it has several chunks.

    units: its parameters. grown: bytes of gradients in the backward of what follows the layers, of each layer from the
    last one on, and of what precedes them; None: they are there from the first backward on. bucketed: autograd's own
    come beside them, and wait for a bucket: bytes of the last of these; None: they stay where they come."""

    costs: StageCosts | None
    choices: RecomputePolicies
    inside: StageInsides
    holds: float = 1.0
    micro_batches: int = 1
    handed: float = 0.0
    flown: float = 0.0
    more_targets: float = 0.0
    units: Units = Units()
    grown: tuple[float, ...] | None = None
    bucketed: float | None = None


def stage_memory(
    section: PartConfig, stage: StageSpec, shape: PartShape, passing: Passing, contexts: bool
) -> StageMemory:
    """Of one stage. contexts: count what a GPU's libraries take."""
    states = rank_bytes(section, stage, shape)
    kept = {"weights": float(states.weights), "optimizer": float(states.optimizer)}
    kept["contexts"] = float(runtime_bytes(stage)) if contexts else 0.0
    whole = gathered_moments(section, shape, passing.units, stage.degrees.shards, contexts)
    held = passing.costs.held_bytes(passing.choices) if passing.costs is not None else 0.0
    moments = list(_moments(kept, float(states.gradients), passing, whole, keeps_gradients(section)))
    idle = {**kept, "gradients": float(states.gradients), "gathered": whole.idle}
    fullest, most = max(moments, key=lambda one: one.total), max(0.0, passing.holds - 1) * held
    most += 0.0 if passing.costs is None else passing.costs.peak_bytes(passing.choices)
    return StageMemory(states, fullest, _fullest(moments), idle, held, passing.holds, most)


def _moments(
    kept: Mapping[str, float], gradients: float, passing: Passing, whole: Gathered, always: bool
) -> Iterator[Moment]:
    """gradients: once all are there. always: they have their memory from the first forward on."""
    held = passing.costs.held_bytes(passing.choices) if passing.costs is not None else 0.0
    before = max(0.0, passing.holds - 1) * held  # of other micro-batches
    there = gradients if always or passing.micro_batches > passing.holds else 0.0  # of earlier ones, in a forward
    kept = {**kept, "handed": max(0.0, passing.holds - 1) * passing.flown}
    yield from _forwards({**kept, "gradients": there}, before, passing, whole)
    yield Moment(UPDATE, {**kept, "handed": 0.0, "gradients": gradients, "gathered": whole.idle})
    if passing.costs is None:
        return
    layers = len(passing.choices)
    first = [gradients] * (layers + 2) if passing.grown is None else passing.grown
    stay = passing.grown is not None and passing.bucketed is None
    yield from _backwards(kept, before, passing, first, stay, whole)
    if passing.bucketed is not None:
        yield Moment(BACKWARD, {**kept, "gradients": gradients, "activations": before, "inside": passing.bucketed})
    if passing.micro_batches > 1:  # a later one, which finds the gradients of those before it
        fewer = before if passing.micro_batches > passing.holds else max(0.0, before - held)
        yield from _backwards(kept, fewer, passing, [gradients] * (layers + 2), False, whole)


def _forwards(taken: Mapping[str, float], before: float, passing: Passing, whole: Gathered) -> Iterator[Moment]:
    inside, costs = passing.inside, passing.costs
    taken = {**taken, "gathered": whole.forward}
    behind = before
    if inside.before is not None:
        yield Moment(FORWARD, {**taken, "activations": behind, "inside": inside.before.forward})
    behind += costs.before_bytes if costs is not None else 0.0
    for at, (choice, own) in enumerate(zip(passing.choices, inside.layers, strict=True)):
        yield Moment(FORWARD, {**taken, "activations": behind, "inside": own.forward})
        behind += costs.layer(at, choice).held_bytes if costs is not None else 0.0
    if inside.after is not None:
        taken = {**taken, "gathered": whole.loss}
        yield Moment(LOSS, {**taken, "activations": behind, "loss": inside.after.forward + passing.more_targets})


def _backwards(
    taken: Mapping[str, float],
    before: float,
    passing: Passing,
    gradients: Sequence[float],
    grows: bool,
    whole: Gathered,
) -> Iterator[Moment]:
    """gradients: when the backward of what follows the layers, of each layer from the last one on, and of what precedes
    them begins. grows: they come one by one."""
    inside, costs = passing.inside, passing.costs
    assert costs is not None
    behind = before + costs.held_bytes(passing.choices)
    grown = iter(gradients)
    taken = {**taken, "handed": taken["handed"] + passing.handed, "gathered": whole.backward}
    summed, last = ({**taken, "gathered": own} for own in (whole.summing, whole.last))
    of_after = {**taken, "gradients": next(grown), "activations": behind, "gathered": whole.after}
    if inside.after is not None:
        yield Moment(BACKWARD, {**of_after, "inside": inside.after.back(grows)})
    behind -= costs.after_bytes
    for at in reversed(range(len(passing.choices))):
        layer = costs.layer(at, passing.choices[at])
        inner = max(layer.replay_bytes, inside.layers[at].back(grows))
        again = {"recomputed": layer.replay_bytes, "inside": inner - layer.replay_bytes}
        there = next(grown)
        computing = last if at == len(passing.choices) - 1 else taken
        yield Moment(BACKWARD, {**computing, "gradients": there, "activations": behind, **again})
        behind -= layer.held_bytes
        yield Moment(BACKWARD, {**summed, "gradients": there, "activations": behind})
    if inside.before is not None:
        own = inside.before.back(grows)
        yield Moment(BACKWARD, {**taken, "gradients": next(grown), "activations": behind, "inside": own})
    if whole.ending:
        yield Moment(BACKWARD, {**taken, "gradients": gradients[-1], "activations": before, "gathered": whole.ending})


def _fullest(moments: Sequence[Moment]) -> tuple[Moment, ...]:
    found: dict[str, Moment] = {}
    for one in moments:
        if one.name not in found or one.total > found[one.name].total:
            found[one.name] = one
    return tuple(found.values())


def device_peak(
    stages: Mapping[str, StageMemory], together: bool, holding: Mapping[str, Mapping[str, float]]
) -> Moment:
    """Of a device with ranks of these stages. together: they may be at their peaks at once, as where memory that one
    has freed stays with its process. holding: for each stage, how many micro-batches each holds while it works."""
    if together:
        return _joined("peaks of " + " and ".join(stages), [one.peak.taken for one in stages.values()])
    found = []
    for name, own in stages.items():
        others = [
            {**other.idle, "activations": other.held_bytes * holding[name][at]}
            for at, other in stages.items()
            if at != name
        ]
        found.append(_joined(f"{own.peak.name} of {name}", [own.peak.taken, *others]))
    return max(found, key=lambda one: one.total)


def _joined(name: str, taken: Sequence[Mapping[str, float]]) -> Moment:
    return Moment(name, {what: sum(one.get(what, 0.0) for one in taken) for what in NAMES})


def memory_of(
    asked: Question, stage: StageSpec, costs: StageCosts | None, recompute: Mapping[str, RecomputePolicies]
) -> StageMemory:
    """Of a stage, with what its layers recompute. costs: of what they keep; None: no backward goes through it."""
    plan = asked.plan
    section = parts(plan.config)[stage.part]
    kept = asked.counted.keeps(stage.part, Cut.of(section))
    passing = Passing(
        costs,
        recompute[stage.name],
        kept.inside(_of_one_chunk(rows_of_stage(asked, stage)), stage.layers, recompute[stage.name]),
        asked.arrangement.holding[stage.name][stage.name],
        asked.passes(stage.part),
        _handed(asked, stage),
        _flown(asked, stage),
        _more_targets(asked, stage),
        asked.counted.units_of(stage, Cut.of(section)),
        *_grown(asked, stage),
    )
    return stage_memory(section, stage, shape_of(asked.plan, stage), passing, asked.machine.contexts)


def rows_of_stage(asked: Question, stage: StageSpec) -> TracedRows:
    """Of its largest micro-batch."""
    return (text_rows if stage.part == DECODER else tower_rows)(asked.loads.worst, stage.degrees)


def _of_one_chunk(rows: TracedRows) -> TracedRows:
    """With as many targets as the loss takes at once."""
    return replace(rows, targets=min(rows.targets, CHUNK_ROWS))


def _handed(asked: Question, stage: StageSpec) -> float:
    """Bytes of gradients that a rank receives and hands on, and of those with which its backward begins, beyond what
    is inside its layers' passes; with tensor parallelism also a copy of the one that ranks sum. Of a decoder also those
    for a pass of an encoder over several micro-batches, which wait for the last one, where nothing is copied."""
    if not any(map(asked.plan.graph.goes_back, stage.nodes)):
        return 0.0
    section, rows = parts(asked.plan.config)[stage.part], rows_of_stage(asked, stage)
    size, width = VALUE_BYTES[section.dtype], hidden_width(asked.plan.family)
    if stage.part == DECODER:
        states = rows.tokens * width * size
        between = (0 not in stage.layers) + 2 * (len(asked.counted.sizes.layers) - 1 not in stage.layers)
        merged = [edge for node in stage.nodes for edge in asked.plan.graph.inputs(node) if edge.gradients]
        waiting = sum((edge.batch - 1) * len(edge.tensors) for edge in merged) * rows.features * width * size
        return float(states * (between + (stage.degrees.tensor > 1)) + (waiting if asked.machine.mapped else 0))
    outputs = [edge for node in stage.nodes for edge in asked.plan.graph.outputs(node)]
    family, patches = asked.plan.family, rows_of_stage(asked, stage).patches
    features = patches / family.tower.patches_of_token * hidden_width(family)
    each = [
        patches * tower_width(family) if edge.tensors == (HIDDEN_STATES,) else features * len(edge.tensors)
        for edge in outputs
    ]
    copied = patches * tower_width(family) * ((stage.degrees.tensor > 1) + (0 not in stage.layers))
    return size * (2 * sum(each) + copied)


def _flown(asked: Question, stage: StageSpec) -> float:
    """Bytes of what one micro-batch received and will have handed on, which autograd need not keep."""
    section, rows, family = parts(asked.plan.config)[stage.part], rows_of_stage(asked, stage), asked.plan.family
    width, sent = hidden_width(family), [e for node in stage.nodes for e in asked.plan.graph.outputs(node)]
    numbers: float
    if stage.part == DECODER:
        numbers = rows.tokens * width * bool(sent) + rows.features * width * (0 in stage.layers)
    else:
        features = rows.patches / family.tower.patches_of_token
        numbers = features * width * sum(e.tensors != (HIDDEN_STATES,) for e in sent)
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


def _grown(asked: Question, stage: StageSpec) -> tuple[tuple[float, ...] | None, float | None]:
    """`grown` and `bucketed` of `Passing`. Gradients that are summed, or in another format than the weights', go into
    buckets, which take memory as they fill; ZeRO's have all their room before backward begins."""
    section = parts(asked.plan.config)[stage.part]
    if section.zero_stage:
        return None, None
    trained = asked.counted.unit_parameters(stage.part, Cut.of(section), trained=True)
    units, value = [trained[at + 1] for at in reversed(stage.layers)], sum_bytes(section)
    after = trained[-1] if len(trained) - 3 in stage.layers else 0
    found = [float(value * count) for count in accumulate([0, after, *units])]
    if stage.degrees.shards == 1 and VALUE_BYTES[section.dtype] == value:
        return tuple(found), None
    before = trained[0] if 0 in stage.layers else 0
    return (*found[1:], found[-1]), float(VALUE_BYTES[section.dtype] * before)


def shape_of(plan: RunPlan, stage: StageSpec) -> PartShape:
    """Parameters of a stage."""
    part = plan.family.parts[stage.part]
    held = plan.counted.held(stage.part, Cut.of(parts(plan.config)[stage.part]))
    absent = part.absent(chunks_of(stage.chunks, part.whole))
    selects = bool(plan.rules.selects or plan.family.idle)
    return sum_shape(stage_parameters(held, absent), selects, plan.config.training.optimizer)


def fullest_device(asked: Question, memory: Mapping[str, StageMemory]) -> tuple[Moment, tuple[str, ...]]:
    """The fullest moment of the fullest device, and the stages there."""
    plan, arrangement = asked.plan, asked.arrangement
    found = {
        stages: device_peak(
            {name: memory[name] for name in memory if name in stages}, arrangement.together, arrangement.holding
        )
        for stages in arrangement.sharing
    }
    fullest = max(found, key=lambda stages: found[stages].total)
    return found[fullest], tuple(stage.name for stage in plan.graph.stages if stage.name in fullest)


def counted_costs(asked: Question) -> dict[str, StageCosts]:
    """By stage through which gradients go back, as `dhp.plan.recompute.profile` has them of measured steps. Raises
    ModelError where what layers keep is not known."""
    graph = asked.plan.graph
    going = [stage for stage in graph.stages if any(map(graph.goes_back, stage.nodes))]
    return {stage.name: _of_stage(asked, stage) for stage in going}


def _of_stage(asked: Question, stage: StageSpec) -> StageCosts:
    section = parts(asked.plan.config)[stage.part]
    kept, rows = asked.counted.keeps(stage.part, Cut.of(section)), rows_of_stage(asked, stage)
    rates = asked.machine.of(stage.part, section.dtype)
    units = unit_seconds(asked.counted, stage.part, section, stage.degrees, asked.loads, rates)
    count = asked.passes(stage.part)
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
    both = zip(astuple(one), astuple(other), strict=True)
    return LayerCost(*(max(pair) for pair in both))
