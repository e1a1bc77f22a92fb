"""Sums of both sides of preferences, and what a step says of them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain

from dhp.config.training import TrainingConfig
from dhp.core.batch import StepInfo
from dhp.core.preferences import REJECTED, Mark
from dhp.core.reports import SampleSums, StageReport
from dhp.objectives.objectives import OBJECTIVES
from dhp.step.stages import Stages
from dhp.trainer.step_reports import Place, SampleSum, add_by_sample

Shards = Sequence[SampleSums | None]
NAMES = ("chosen_logp", "rejected_logp", "chosen_reward", "rejected_reward", "margin", "accuracy")
_NOWHERE: Place = ("", -1)


def add_by_side(info: StepInfo, shards: Shards, sharing: int) -> dict[Place, tuple[SampleSum, SampleSum]]:
    """Of preferences: what the shards of a stage have of both sides of each, added. As `add_by_sample` otherwise."""
    if not info.marks:  # no sample of the batch could be read
        return {}
    first, second = (add_by_sample(_only(info, side), shards, sharing) for side in (True, False))
    return {place: (one, second[place]) for place, one in first.items() if place != _NOWHERE}


def _only(info: StepInfo, first: bool) -> StepInfo:
    """The places of samples that are this side of theirs."""
    order = tuple(
        tuple(
            tuple(place if mark.first == first else _NOWHERE for place, mark in zip(places, marks, strict=True))
            for places, marks in zip(of_rows, of_marks, strict=True)
        )
        for of_rows, of_marks in zip(info.order, info.marks, strict=True)
    )
    return replace(info, order=order)


def preference_means(
    infos: Sequence[StepInfo], shards: Sequence[Shards], sharing: int, training: TrainingConfig
) -> dict[str, float] | None:
    """What metrics.jsonl has of the preferences of some batches; None: they have none. shards: of the last stage, of
    each batch. sharing: those that share a row."""
    refers, beta = OBJECTIVES[training.objective].refers, training.preference.beta
    rows = []
    for info, of_batch in zip(infos, shards, strict=True):
        marks = _marks(info)
        for place, sides in add_by_side(info, of_batch, sharing).items():
            of_place = marks[place]  # side by side; of a row that the step has twice, both times
            times, sign = len(of_place) // 2, -1 if of_place[0].side == REJECTED else 1
            logps = [-side.total / (times if refers else max(side.targets, 1)) for side in sides]
            references = [sum(mark.reference for mark in of_place[at::2]) / times if refers else 0.0 for at in range(2)]
            rewards = [beta * (logp - reference) for logp, reference in zip(logps, references, strict=True)]
            margin = sign * (rewards[0] - rewards[1])
            rows.append((*logps, *rewards, margin, float(margin > 0)))
    return {name: sum(column) / len(rows) for name, column in zip(NAMES, zip(*rows))} if rows else None


def step_means(
    info: StepInfo, reports: Mapping[str, Sequence[StageReport]], stages: Stages, training: TrainingConfig
) -> dict[str, float] | None:
    """The same of a step. reports: by stage, of every rank."""
    *_, last = stages.values()
    sums = [report.samples for report in last.leaders(reports[last.spec.name])]
    return preference_means([info], [sums], last.spec.degrees.sequence, training)


def _marks(info: StepInfo) -> dict[Place, list[Mark]]:
    found: dict[Place, list[Mark]] = {}
    for places, marks in zip(chain.from_iterable(info.order), chain.from_iterable(info.marks), strict=True):
        for place, mark in zip(places, marks, strict=True):
            found.setdefault(place, []).append(mark)
    return found
