"""Bytes of one rank at each moment of a step.

Moments are the forward of each layer, whose insides come and go; the loss, when all activations are held and logits
besides; the backward of each layer, when what follows it is freed, its insides may be made again, and weights that are
cut are whole for a while; and the update."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dhp.config.schema import PartConfig
from dhp.core.graph import StageSpec
from dhp.core.reports import RecomputePolicies
from dhp.models.shape import PartShape
from dhp.plan.count.costs import StageCosts
from dhp.plan.count.row_bytes import StageInsides
from dhp.plan.count.state_bytes import (
    Gathered,
    RankBytes,
    Units,
    gathered_moments,
    keeps_gradients,
    rank_bytes,
    runtime_bytes,
)

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

    units: its parameters. grown: bytes of gradients when each layer's backward begins, and when the last one is done,
    where they come one by one; None: they are there from the first backward on."""

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
    yield from _backwards(kept, before, passing, first, passing.grown is not None, whole)
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
