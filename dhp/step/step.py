"""One training step, as it reads: the schedule's actions in order, the joint norm, the optimizer steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dhp.step.schedule import Schedule
from dhp.step.stages import Batch, Parts, Ref, Refs


@dataclass(frozen=True)
class StepRefs:
    """What a submitted step will answer: its counts, and a report from each rank of each part."""

    info: Ref
    reports: dict[int, list[Any]]


def train_step(parts: Parts, schedule: Schedule, batch: Batch) -> StepRefs:
    """Submit one step. Nothing is waited for: refs go from actor to actor, the driver opens none of them."""
    accumulate_gradients(parts, schedule, batch)
    return update_weights(parts, batch)


def accumulate_gradients(parts: Parts, schedule: Schedule, batch: Batch) -> None:
    """Submit the schedule's actions in order."""
    refs = Refs(batch)
    for action in schedule:
        parts[action.part].run(action, refs)


def update_weights(parts: Parts, batch: Batch) -> StepRefs:
    """Submit the norm of each part, and to each part an optimizer step clipped by the norm of all.

    A part gets the norms of the others and keeps its own: the part that ends a step goes on at once.
    """
    norms = {k: _first(part.group.execute_all_async("grad_norm_sq", batch.info)) for k, part in parts.items()}
    reports = {}
    for number, part in parts.items():
        others = [norm for other, norm in norms.items() if other != number]
        answers = part.group.execute_all_async("optimizer_step", batch.info, *others)
        reports[number] = [report for (report,) in answers]
    return StepRefs(batch.info, reports)


def _first(of_ranks: list[list[Ref]]) -> Ref:
    """Every rank knows the norm of its whole part; the first one's answer is as good as any."""
    return of_ranks[0][0]
