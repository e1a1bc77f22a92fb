"""Bytes of one rank at each moment of a step: what is there together, not a sum of what never is.

Moments are the loss, when all activations are held and logits besides; the beginning of backward, when gradients begin
to be there; the backward of each layer, when what follows it is freed, its insides may be made again, and weights that
are cut are whole for a while; and the update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dhp.config.part import PartConfig
from dhp.core.graph import StageSpec
from dhp.core.reports import RecomputePolicies
from dhp.models.shape import PartShape
from dhp.models.types import HeadShape
from dhp.planner.costs import StageCosts
from dhp.trainer.memory import RankBytes, gathered_bytes, loss_bytes, rank_bytes, runtime_bytes

NAMES = (
    "weights", "optimizer", "gradients", "activations", "recomputed", "loss", "gathered", "contexts",
)  # fmt: skip


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
    micro-batch; holds: micro-batches that it holds at most.
    """

    states: RankBytes
    peak: Moment
    others: tuple[Moment, ...]
    idle: Mapping[str, float]
    held_bytes: float
    holds: float


def stage_memory(
    section: PartConfig,
    stage: StageSpec,
    shape: PartShape,
    head: HeadShape | None,
    costs: StageCosts | None,
    choices: RecomputePolicies,
    holds: float,
    accumulates: bool,
    contexts: bool,
) -> StageMemory:
    """Of one stage. costs: of what its layers keep of a micro-batch; None: no backward goes through it. holds:
    micro-batches that it holds at most. accumulates: gradients of earlier micro-batches are there in a forward.
    contexts: count what a GPU's libraries take."""
    states = rank_bytes(section, stage, shape)
    kept = {"weights": float(states.weights), "optimizer": float(states.optimizer)}
    kept["contexts"] = float(runtime_bytes(stage)) if contexts else 0.0
    whole = float(gathered_bytes(section, shape, max(1, len(stage.layers)), head))
    logits = float(loss_bytes(section, head)) if head is not None and head.loss else 0.0
    held = costs.held_bytes(choices) if costs is not None else 0.0
    before = max(0.0, holds - 1) * held
    moments = list(_moments(kept, float(states.gradients), costs, choices, before, logits, whole, accumulates))
    idle = {**kept, "gradients": float(states.gradients)}
    return StageMemory(states, max(moments, key=lambda one: one.total), _fullest(moments), idle, held, holds)


def _moments(
    kept: Mapping[str, float],
    gradients: float,
    costs: StageCosts | None,
    choices: RecomputePolicies,
    before: float,
    logits: float,
    whole: float,
    accumulates: bool,
) -> Iterator[Moment]:
    """before: activations of other micro-batches. whole: of what is gathered for a while."""
    held = costs.held_bytes(choices) if costs is not None else 0.0
    there = gradients if accumulates else 0.0
    yield Moment("loss", {**kept, "gradients": there, "activations": before + held, "loss": logits, "gathered": whole})
    yield Moment("update", {**kept, "gradients": gradients})
    if costs is None:
        return
    behind = before + costs.before_bytes
    for at, choice in enumerate(choices):
        layer = costs.layer(at, choice)
        behind += layer.held_bytes
        taken = {"gradients": gradients, "activations": behind, "recomputed": layer.replay_bytes, "gathered": whole}
        yield Moment("backward", {**kept, **taken})


def _fullest(moments: Sequence[Moment]) -> tuple[Moment, ...]:
    """Of each name."""
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
