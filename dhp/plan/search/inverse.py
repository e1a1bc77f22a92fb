"""Inverse queries: fewest devices, longest sample, least memory."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import ceil

from dhp.plan.count.loads import Worst
from dhp.plan.forecast.forecast import forecast
from dhp.plan.run_plan import Question
from dhp.plan.search.candidates import Candidate
from dhp.plan.search.layout_search import search
from dhp.plan.search.space import Space

FORECASTS = 3  # of each search
DOUBLINGS = 3  # of the devices that are tried, where those that there are do not do
MOST_TOKENS = 1 << 22  # of a row that is looked at
_STEP_TOKENS = 64  # to which the longest sample is found


@dataclass(frozen=True)
class Ways:
    """devices: the fewest on which a layout fits, and it; None: none of those tried. smallest: the layout that takes
    the least memory. in_time: as `devices`, for the wanted hours; None: not asked for, or not to be had.

    longest: tokens of the longest row that the best layout has room for. rows: samples of a row, as long as those of
    the longest one. Both are 0 where no layout fits."""

    devices: Candidate | None
    smallest: Candidate | None
    in_time: Candidate | None = None
    longest: int = 0
    rows: int = 0


def on_devices(space: Space, count: int) -> Candidate | None:
    """The best layout of so many devices; None where none fits."""
    machine = replace(space.machine, count=count)
    return next(iter(search(replace(space, machine=machine), FORECASTS).candidates), None)


def smallest_memory(space: Space) -> Candidate | None:
    """The layout that takes the least of a device, whatever the device has."""
    machine = replace(space.machine, memory_bytes=1.0)
    return search(replace(space, machine=machine), 1).tight


def fewest_devices(space: Space, best: Candidate | None) -> Candidate | None:
    """The layout that fits on the fewest devices: of those that divide what there is, or where nothing fits on these,
    of twice, four or eight times as many. best: of all devices; None: none fits."""
    count = space.machine.count
    if best is None:
        more = (on_devices(space, count << times) for times in range(1, DOUBLINGS + 1))
        return next((one for one in more if one is not None), None)
    fewer = [own for own in range(1, count) if count % own == 0]
    known: dict[int, Candidate] = {count: best}

    def fits(own: int) -> bool:
        found = on_devices(space, own)
        if found is not None:
            known[own] = found
        return found is not None

    return known[_first([*fewer, count], fits)]


def devices_in_time(space: Space, best: Candidate | None, samples: int, hours: float) -> Candidate | None:
    """The layout on the fewest devices that goes through so many samples in so many hours."""

    def enough(one: Candidate | None) -> bool:
        return one is not None and samples / _samples_s(space, one) <= hours * 3600

    count, found = space.machine.count, best if enough(best) else None
    if found is None:
        more = (on_devices(space, count << times) for times in range(1, DOUBLINGS + 1))
        return next((one for one in more if enough(one)), None)
    for own in sorted((own for own in range(1, count) if count % own == 0), reverse=True):
        fewer = on_devices(space, own)
        if not enough(fewer):
            break
        found = fewer
    return found


def _samples_s(space: Space, one: Candidate) -> float:
    """Samples a second: a step has batch_size of them, or, by rows of tokens, what an epoch has by its steps."""
    loads = one.found.loads
    each = loads.samples / loads.steps if loads.steps and loads.samples else space.config.training.batch_size
    return each / one.found.step_s


def samples_a_step(space: Space, one: Candidate) -> float:
    """Samples of a mean step."""
    return _samples_s(space, one) * one.found.step_s


def longest_row(space: Space, best: Candidate) -> int:
    """Tokens of the longest row that a layout has room for, recomputing as much as it needs; pictures as they are."""
    worst = best.found.loads.worst

    def fits(steps: int) -> bool:
        tokens = steps * _STEP_TOKENS
        targets = ceil(worst.targets * tokens / max(1, worst.tokens))
        return _fits(space, best, replace(worst, tokens=tokens, targets=targets))

    return _last(max(1, worst.tokens // _STEP_TOKENS), MOST_TOKENS // _STEP_TOKENS, fits) * _STEP_TOKENS


def largest_rows(space: Space, best: Candidate) -> int:
    """Samples of a row, each as long as those of the longest one."""
    size, worst = best.plan.config.training.micro_batch_size, best.found.loads.worst

    def fits(samples: int) -> bool:
        share = samples / size
        own = {name: ceil(getattr(worst, name) * share) for name in ("tokens", "features", "targets", "patches")}
        return _fits(space, best, replace(worst, **own))

    return _last(size, 4096, fits)


def _fits(space: Space, best: Candidate, worst: Worst) -> bool:
    loads = replace(best.found.loads, worst=worst)
    found = forecast(Question(best.plan, space.machine, loads))
    return found.peak.total <= space.machine.limit_bytes


def _first(values: Sequence[int], fits: Callable[[int], bool]) -> int:
    """The first that fits, of values of which all behind it do; the last one does."""
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if fits(values[middle]) else (middle + 1, high)
    return values[low]


def _last(start: int, most: int, fits: Callable[[int], bool]) -> int:
    """The largest number that fits, where `start` does."""
    low, high = start, start * 2
    while high < most and fits(high):
        low, high = high, high * 2
    while high - low > max(1, low // 64):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
