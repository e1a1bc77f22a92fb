"""Steps of a run under given cuts, and what its layers took of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

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


@dataclass(frozen=True)
class Measured:
    """How a run's reports are read. micro_batches: of a step. first_back: of each part, the first unit through which a
    backward goes. replanned: parts whose layers recompute in trials what a plan decides in the run."""

    micro_batches: int
    first_back: Mapping[str, int]
    replanned: frozenset[str] = frozenset()


def unit_times(graph: StageGraph, reports: Mapping[str, Sequence[StageReport]], measured: Measured) -> PartTimes:
    """Of one step's reports, in the mean of a stage's ranks; a rank, or stage, without work in it took nothing. What a
    stage takes beside its layers counts for what precedes the first one or follows the last one, where it has these,
    and for all of its layers alike where it has not. Backward is not measured by layer: units through which one goes
    have their shares of forward."""
    found = {}
    for part in graph.parts():
        stages = graph.of_part(part)
        times = [UnitTimes(0.0, 0.0)] * (2 + sum(len(stage.layers) for stage in stages))
        for stage in stages:
            usages = [report.usage for report in reports[stage.name] if report.usage is not None]
            forwards = _forwards(stage, usages, len(times) - 1)
            back = {at: one for at, one in forwards.items() if at >= measured.first_back[part]}
            backward_s, total = _backward(usages, part in measured.replanned), sum(back.values()) or 1.0
            share = 1 / len(reports[stage.name]) / measured.micro_batches
            for at, seconds in forwards.items():
                times[at] = UnitTimes(seconds * share, backward_s * back.get(at, 0.0) / total * share)
        found[part] = tuple(times)
    return found


def _forwards(stage: StageSpec, usages: Sequence[StageUsage], last: int) -> dict[int, float]:
    """By unit, seconds of all micro-batches and ranks. last: the unit behind the part's layers."""
    layers = [sum(usage.layers[at].forward_s for usage in usages) for at, _ in enumerate(stage.layers)]
    found = dict(zip((layer + 1 for layer in stage.layers), layers, strict=True))
    beside = max(0.0, sum(usage.forward_s for usage in usages) - sum(layers))
    if last - 1 in found or 1 in found:
        return found | {last if last - 1 in found else 0: beside}
    return {at: seconds + beside / len(layers) for at, seconds in found.items()}


def _backward(usages: Sequence[StageUsage], replanned: bool) -> float:
    again = sum(layer.replay_s for usage in usages for layer in usage.layers) if replanned else 0.0
    return max(0.0, sum(usage.backward_s for usage in usages) - again)


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
