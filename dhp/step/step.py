"""One training step: the schedule's actions in order, the joint norm, the optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dhp.base.stages import Tie
from dhp.step.schedule import Schedule, last_backwards, without_idle
from dhp.step.stages import Batch, InFlight, Ref, Stages


@dataclass(frozen=True)
class StepRefs:
    """Results of a submitted step: its counts, and by stage a report from each rank."""

    info: Ref
    reports: dict[str, list[Any]]


def train_step(stages: Stages, schedule: Schedule, ties: tuple[Tie, ...], batch: Batch) -> StepRefs:
    """Submit one step. Nothing is waited for: refs go from actor to actor, the run loop opens none of them."""
    accumulate_gradients(stages, schedule, batch)
    return update_weights(stages, ties, batch)


def accumulate_gradients(stages: Stages, schedule: Schedule, batch: Batch) -> None:
    """Submit the schedule's actions in order, without those that have no work in this step."""
    in_flight = InFlight(batch)
    actions = without_idle(schedule, lambda action: stages[action.node.stage].is_idle(action, batch))
    last = last_backwards(actions)
    for at, action in enumerate(actions):
        stages[action.node.stage].run(action, at in last, in_flight)
    for stage in stages.values():
        stage.flush()


def update_weights(stages: Stages, ties: tuple[Tie, ...], batch: Batch) -> StepRefs:
    """Submit the norm of each stage, and to each an optimizer step clipped by the norm of all.

    A stage gets the norms of the others and keeps its own: the stage that ends a step goes on at once. Of a weight that
    two stages hold, each gets the other's gradient first.
    """
    ties = tuple(tie for tie in ties if tie.trained)
    shares = {name: stages[name].tied_gradient(batch.info) for tie in ties for name in (tie.owner, tie.other)}
    tied = {tie.owner: shares[tie.other] for tie in ties} | {tie.other: shares[tie.owner] for tie in ties}
    norms = {name: stage.grad_norm_sq(batch.info, tied.get(name, ())) for name, stage in stages.items()}
    reports = {}
    for name, stage in stages.items():
        others = [norm for other, norm in norms.items() if other != name]
        reports[name] = stage.optimizer_step(batch.info, *others)
    return StepRefs(batch.info, reports)
