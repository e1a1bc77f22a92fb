"""Steps of a run under given cuts, and what its layers took of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from dhp.core.errors import ModelError
from dhp.core.graph import StageGraph, StageSpec
from dhp.core.reports import StageReport, StageUsage
from dhp.plan.cut.units import Unit


@dataclass(frozen=True)
class UnitTimes:
    """One unit and a mean micro-batch of the step: its forward, and its share of its stage's backward."""

    forward_s: float
    backward_s: float


PartTimes = Mapping[str, Sequence[UnitTimes]]  # of all units of each part, in order


@dataclass(frozen=True)
class TrialStep:
    """One step of a trial. seconds: from its submission to its end."""

    seconds: float
    times: PartTimes


@dataclass(frozen=True)
class Trials:
    """Trials of a run (OmniBal, section 4.2: five steps give the times of layers, three judge each candidate).

    times: by which its layers are cut. run: cuts of some parts, as their keys have them → some steps under these; no
    step where they do not fit. wall: whether a step's seconds judge cuts; else, as where devices share cores and every
    cut takes as long, its units' times do, through the schedule's programs."""

    times: PartTimes
    run: Callable[[Mapping[str, Sequence[int]]], Sequence[TrialStep]]
    wall: bool


def unit_times(graph: StageGraph, reports: Mapping[str, Sequence[StageReport]], micro_batches: int) -> PartTimes:
    """Of one step's reports, in the mean of a stage's ranks; a rank without work in it took nothing. What a stage takes
    beside its layers counts for what precedes the first one or follows the last one, where it has these, and for all of
    its layers alike where it has not. Backward is not measured by layer: units have their shares of forward.

    Raises ModelError where no rank of a stage had any work, or measured it."""
    found = {}
    for part in graph.parts():
        stages = graph.of_part(part)
        times = [UnitTimes(0.0, 0.0)] * (2 + sum(len(stage.layers) for stage in stages))
        for stage in stages:
            usages = [report.usage for report in reports[stage.name] if report.usage is not None]
            if not usages:
                raise ModelError(f"no rank of {stage.name} measured its layers in this step: it had nothing to compute")
            share = 1 / len(reports[stage.name]) / micro_batches
            for at, own in _stage_times(stage, usages, len(times) - 1).items():
                times[at] = UnitTimes(own.forward_s * share, own.backward_s * share)
        found[part] = tuple(times)
    return found


def _stage_times(stage: StageSpec, usages: Sequence[StageUsage], last: int) -> dict[int, UnitTimes]:
    """By unit, seconds of all micro-batches and ranks. last: the unit behind the part's layers."""
    layers = [sum(usage.layers[at].forward_s for usage in usages) for at, _ in enumerate(stage.layers)]
    forward_s, backward_s = (sum(getattr(one, key) for one in usages) for key in ("forward_s", "backward_s"))
    forwards = dict(zip((layer + 1 for layer in stage.layers), layers, strict=True))
    beside = max(0.0, forward_s - sum(layers))
    if last - 1 in forwards or 1 in forwards:
        forwards[last if last - 1 in forwards else 0] = beside
    else:
        forwards = {at: seconds + beside / len(layers) for at, seconds in forwards.items()}
    total = sum(forwards.values()) or 1.0
    return {at: UnitTimes(seconds, backward_s * seconds / total) for at, seconds in forwards.items()}


def median_times(steps: Sequence[TrialStep]) -> PartTimes:
    """Of each unit over some steps."""
    return {
        part: tuple(
            UnitTimes(
                *(median(getattr(step.times[part][at], key) for step in steps) for key in ("forward_s", "backward_s"))
            )
            for at, _ in enumerate(times)
        )
        for part, times in steps[0].times.items()
    }


def timed(units: Sequence[Unit], times: PartTimes) -> tuple[Unit, ...]:
    """The units with these seconds in the place of theirs."""
    left = {part: iter(own) for part, own in times.items()}
    found = []
    for unit in units:
        own = next(left[unit.part])
        found.append(replace(unit, forward_s=own.forward_s, backward_s=own.backward_s))
    return tuple(found)
