"""Seconds and bytes of all runs of units."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray

from dhp.core.errors import ConfigError
from dhp.plan.cut.problem import PartitionProblem, bounds_of
from dhp.plan.cut.simulate import Costs, simulate
from dhp.plan.cut.units import Numbers, Saved, Unit

Option = tuple[str, Saved]  # a choice of recompute by its name


@dataclass(frozen=True)
class Front:
    """held: bytes, ascending; seconds: of recomputing, descending: no point is worse in both than another."""

    held: Numbers
    seconds: Numbers

    def plus(self, other: Front) -> Front:
        """The front of two runs together."""
        held = (self.held[:, None] + other.held[None, :]).ravel()
        return pareto(held, (self.seconds[:, None] + other.seconds[None, :]).ravel())

    def least(self, caps: Numbers) -> Numbers:
        """The least seconds with no more bytes than each cap; inf where there is none."""
        at = np.searchsorted(self.held, caps, side="right") - 1
        return np.where(at >= 0, self.seconds[at], np.inf)


EMPTY = Front(np.zeros(1), np.zeros(1))


def pareto(held: Numbers, seconds: Numbers) -> Front:
    """Of these points, those that no other one is as good as in both."""
    order = np.lexsort((seconds, held))
    held, seconds = held[order], seconds[order]
    best = np.minimum.accumulate(seconds)
    keeps = np.concatenate([[True], seconds[1:] < best[:-1]])
    return Front(held[keeps], seconds[keeps])


class Fronts:
    """The fronts of a chain's runs. first: the first unit through which a backward goes; those before keep nothing."""

    def __init__(self, units: Sequence[Unit], first: int):
        self._units, self._first = units, first
        options = [self.options(at) for at in range(len(units))]
        self._kinds = list(dict.fromkeys(own for own in options if len(own) > 1))
        counts = np.array([[own == kind for own in options] for kind in self._kinds], dtype=int)
        counts = counts.reshape(len(self._kinds), len(units))
        self._counts = np.concatenate([np.zeros((len(self._kinds), 1), dtype=int), counts.cumsum(axis=1)], axis=1)
        self._of_kind: dict[tuple[int, int], Front] = {}
        self._joined: dict[tuple[int, ...], Front] = {(): EMPTY}

    def options(self, at: int) -> tuple[Option, ...]:
        """The choices of one unit that are worth a thought, those that keep least first."""
        if at < self._first:
            return (("none", Saved(0.0)),)
        every = sorted(self._units[at].saved.items(), key=lambda one: (one[1].held_bytes, one[1].replay_s))
        found: list[Option] = []
        for name, saved in every:
            if not found or saved.replay_s < found[-1][1].replay_s:
                found.append((name, saved))
        return tuple(found)

    @cached_property
    def single(self) -> Numbers:
        """Of each unit without a choice, what it keeps; 0 of others."""
        own = [self.options(at) for at in range(len(self._units))]
        return np.array([options[0][1].held_bytes if len(options) == 1 else 0.0 for options in own])

    def least(self, first: int, end: int, caps: Numbers) -> Numbers:
        """The least seconds for which the units from `first` to `end` that have a choice keep no more than each cap."""
        counts = self._counts[:, end] - self._counts[:, first]
        fronts = [self._of(kind, int(count)) for kind, count in enumerate(counts) if count]
        if not fronts:
            return np.where(caps >= 0, 0.0, np.inf)
        largest = max(range(len(fronts)), key=lambda at: len(fronts[at].held))
        rest = self._rest(counts, [at for at, count in enumerate(counts) if count][largest])
        left = caps[None, :] - rest.held[:, None]
        found: Numbers = np.min(fronts[largest].least(left) + rest.seconds[:, None], axis=0)
        return found

    def _rest(self, counts: NDArray[np.int_], without: int) -> Front:
        """The front of all kinds but one together."""
        key = tuple(0 if kind == without else int(count) for kind, count in enumerate(counts))
        if key not in self._joined:
            front = EMPTY
            for kind, count in enumerate(key):
                front = front.plus(self._of(kind, count)) if count else front
            self._joined[key] = front
        return self._joined[key]

    def _of(self, kind: int, count: int) -> Front:
        if count == 0:
            return EMPTY
        if (kind, count) not in self._of_kind:
            held = np.array([saved.held_bytes for _, saved in self._kinds[kind]])
            one = Front(held, np.array([saved.replay_s for _, saved in self._kinds[kind]]))
            self._of_kind[kind, count] = self._of(kind, count - 1).plus(one)
        return self._of_kind[kind, count]

    def choose(self, first: int, end: int, cap: float) -> tuple[str, ...]:
        """Of the units from `first` to `end`, the choices with the least seconds that keep no more than `cap`. Of units
        alike the first ones keep least: what a stage's last ones keep is freed first. Raises ValueError where none do.
        """
        points: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ())]
        for at in range(first, end):
            options = [saved for _, saved in self.options(at)]
            grown = [
                (held + one.held_bytes, seconds + one.replay_s, (*chosen, option))
                for held, seconds, chosen in points
                for option, one in enumerate(options)
            ]
            points = _worth(sorted(grown, key=lambda point: point[:2]), cap)
        if not points:
            raise ValueError(f"the units from {first} to {end} keep more than {cap:.0f} bytes whatever is recomputed")
        chosen = min(points, key=lambda point: point[1])[2]
        return self._ordered(first, chosen)

    def _ordered(self, first: int, chosen: tuple[int, ...]) -> tuple[str, ...]:
        of_kind: dict[tuple[Option, ...], list[int]] = {}
        for at, option in enumerate(chosen, first):
            of_kind.setdefault(self.options(at), []).append(option)
        queues = {kind: iter(sorted(options)) for kind, options in of_kind.items()}
        every = (self.options(first + at) for at in range(len(chosen)))
        return tuple(options[next(queues[options])][0] for options in every)


def _worth(
    points: Sequence[tuple[float, float, tuple[int, ...]]], cap: float
) -> list[tuple[float, float, tuple[int, ...]]]:
    found: list[tuple[float, float, tuple[int, ...]]] = []
    for point in points:
        if point[0] <= cap and (not found or point[1] < found[-1][1]):
            found.append(point)
    return found


Path = tuple[int, ...]  # indices of positions, those of a chain's ends left out


def least_largest(costs: Numbers) -> tuple[float, Path]:
    """The path whose largest cost is least; of several the one whose first run ends first, and so on from there. inf
    and no path where none is finite."""
    tails = largest_behind(costs)
    if not np.isfinite(tails[0, 0]):
        return np.inf, ()
    path, a = [], 0
    for k in range(len(costs) - 1):
        a = int(np.argmin(np.maximum(costs[k, a], tails[k + 1])))
        path.append(a)
    return float(tails[0, 0]), tuple(path)


def largest_behind(costs: Numbers) -> Numbers:
    """[k, a]: the least possible largest cost of the runs from k on, which begin at a."""
    runs, size, _ = costs.shape
    tails = np.full((runs, size), np.inf)
    tails[-1] = costs[-1, :, -1]
    for k in range(runs - 2, -1, -1):
        tails[k] = np.maximum(costs[k], tails[k + 1][None, :]).min(axis=1)
    return tails


def least_sum(costs: Numbers) -> tuple[float, Path]:
    """The path whose costs have the least sum; of several as `least_largest`."""
    runs, size, _ = costs.shape
    tail, ends = costs[-1, :, -1], []
    for k in range(runs - 2, -1, -1):
        sums = costs[k] + tail[None, :]
        ends.append(np.argmin(sums, axis=1))
        tail = sums.min(axis=1)
    if not np.isfinite(tail[0]):
        return np.inf, ()
    path, a = [], 0
    for of_run in reversed(ends):
        a = int(of_run[a])
        path.append(a)
    return float(tail[0]), tuple(path)


def count_below(costs: Numbers, limit: float) -> float:
    """How many paths have all their costs below the limit."""
    ways = np.zeros(costs.shape[1])
    ways[0] = 1.0
    for of_run in costs:
        ways = ways @ (of_run < limit)
    return float(ways[-1])


def limit_for(costs: Numbers, most: int, limit: float) -> float:
    """The highest limit, up to this one, that no more than `most` paths are below; nearly the highest."""
    if count_below(costs, limit) <= most:
        return limit
    low, high = float(largest_behind(costs)[0, 0]), limit
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if count_below(costs, middle) <= most else (low, middle)
    return low


def below(costs: Numbers, limit: float) -> tuple[NDArray[np.int_], Numbers]:
    """All paths whose costs are below the limit, [K, runs - 1], and the largest cost of each, ascending."""
    tails = largest_behind(costs)
    runs, size, _ = costs.shape
    paths, largest = np.zeros((1, 0), dtype=np.int_), np.zeros(1)
    at = np.zeros(1, dtype=np.int_)
    for k in range(runs):
        behind = tails[k + 1] if k + 1 < runs else np.where(np.arange(size) == size - 1, 0.0, np.inf)
        grows = np.maximum(costs[k, at], behind[None, :]) < limit
        which, to = np.nonzero(grows)
        largest = np.maximum(largest[which], costs[k, at[which], to])
        paths, at = np.concatenate([paths[which], to[:, None]], axis=1), to
    order = np.argsort(largest, kind="stable")
    return paths[order, :-1], largest[order]


Cuts = NDArray[np.int_]  # [K, runs - 1]: indices of positions


@dataclass(frozen=True)
class Tables:
    """Of a problem, by indices of its positions: [a, b] for the units from `at[a]` to `at[b]`.

    forward, backward: seconds. replay: [runs, a, b], seconds of recomputing; inf where the run must not be, or does not
    fit. back: whether a backward visits it. hop: [a], of a hand-over there."""

    forward: Numbers
    backward: Numbers
    replay: Numbers
    back: NDArray[np.bool_]
    hop: Numbers


def make_tables(problem: PartitionProblem) -> Tables:
    """All seconds of a problem. With a budget, of programs in which each stage has one run. Raises ConfigError for
    others, where recompute is given and not searched for."""
    units, positions = problem.units, problem.positions
    goes = np.arange(len(units)) >= problem.first_back
    hop = np.array([0.0, *(problem.link.seconds(unit.output_bytes) for unit in units)])[positions.at]
    return Tables(
        forward=positions.sums([unit.forward_s for unit in units]),
        backward=positions.sums(np.where(goes, [unit.backward_s for unit in units], 0.0)),
        replay=_replay(problem),
        back=np.broadcast_to(positions.at[None, :] > problem.first_back, positions.allowed.shape),
        hop=hop,
    )


def _replay(problem: PartitionProblem) -> Numbers:
    runs = problem.runs
    if np.isinf(problem.budget_bytes):
        return np.where(problem.allowed, 0.0, np.inf)
    if runs != problem.stages:
        raise ConfigError(
            f"a budget of {problem.budget_bytes / 1e9:.1f} GB with {runs // problem.stages} runs a stage: which units "
            "recompute is searched for together with the cuts only where each stage has one run. Set "
            "text.virtual_stages=1, or text.recompute to what layers recompute"
        )
    found: dict[tuple[int, bool], Numbers] = {}
    least = []
    for run, count in enumerate(problem.in_flight):
        units = problem.units_of(run)
        key = count, units is problem.units
        if key not in found:
            found[key] = _least(problem, count, units)
        least.append(found[key])
    return np.where(problem.allowed, np.stack(least), np.inf)


def _least(problem: PartitionProblem, count: int, units: tuple[Unit, ...]) -> Numbers:
    """[a, b]: the least seconds of recomputing with so many micro-batches in flight, of units as a run keeps them."""
    at, allowed = problem.positions.at, problem.positions.allowed
    fronts = Fronts(units, problem.first_back)
    options = [fronts.options(unit) for unit in range(len(units))]
    room = problem.budget_bytes - problem.positions.sums([unit.states_bytes for unit in units])
    most = problem.positions.sums([own[-1][1].held_bytes for own in options])
    least = problem.positions.sums([own[0][1].held_bytes for own in options])
    found = np.where(allowed & (count * most <= room), 0.0, np.inf)
    replay = [max(saved.replay_bytes for _, saved in own) for own in options]
    caps = (room - _largest(problem, replay)) / count - problem.positions.sums(fronts.single)
    least = least - problem.positions.sums(fronts.single)
    for a, b in np.argwhere(allowed & np.isinf(found) & (least <= caps)):
        found[a, b] = fronts.least(int(at[a]), int(at[b]), caps[a, b : b + 1])[0]
    return found


def _largest(problem: PartitionProblem, values: list[float]) -> Numbers:
    """[a, b]: the largest of the units from `at[a]` to `at[b]`."""
    at = problem.positions.at
    found = np.zeros((len(at), len(at)))
    for a, first in enumerate(at[:-1]):
        running = np.maximum.accumulate(values[first:])
        found[a, a + 1 :] = running[at[a + 1 :] - first - 1]
    return found


def choices_of(problem: PartitionProblem, cuts: tuple[int, ...]) -> tuple[str, ...]:
    """What each unit recomputes under these cuts. Raises ValueError where they do not fit."""
    found: list[str] = []
    for run, (count, (first, end)) in enumerate(zip(problem.in_flight, bounds_of(problem, cuts), strict=True)):
        fronts, units = Fronts(problem.units_of(run), problem.first_back), problem.units[first:end]
        options = [fronts.options(at) for at in range(first, end)]
        room = problem.budget_bytes - sum(unit.states_bytes for unit in units)
        if count * sum(own[-1][1].held_bytes for own in options) <= room:
            found += [own[-1][0] for own in options]
            continue
        replay = max(saved.replay_bytes for own in options for _, saved in own)
        found += fronts.choose(first, end, (room - replay) / count)
    return tuple(found)


def needed_bytes(problem: PartitionProblem) -> float:
    """What the fullest stage takes at least under any cuts, with everything recomputed."""
    states = problem.positions.sums([unit.states_bytes for unit in problem.units])
    taken = []
    for run, count in enumerate(problem.in_flight):
        fronts = Fronts(problem.units_of(run), problem.first_back)
        options = [fronts.options(at) for at in range(len(problem.units))]
        held = problem.positions.sums([own[0][1].held_bytes for own in options])
        replay = _largest(problem, [max(saved.replay_bytes for _, saved in own) for own in options])
        taken.append(states + count * held + replay)
    return least_largest(np.where(problem.allowed, np.stack(taken), np.inf))[0]


def all_cuts(problem: PartitionProblem) -> Cuts:
    """Every way to cut the chain, by indices of positions."""
    inside = range(1, len(problem.positions.at) - 1)
    found = np.fromiter((index for cuts in combinations(inside, problem.runs - 1) for index in cuts), dtype=np.int_)
    return found.reshape(comb(len(inside), problem.runs - 1), problem.runs - 1)


def costs_of(tables: Tables, cuts: Cuts) -> Costs:
    """Of cuts, for `simulate`. Seconds of recomputing count as backward; inf where a cut does not fit."""
    last = len(tables.hop) - 1
    ends = np.concatenate([np.zeros((len(cuts), 1), int), cuts, np.full((len(cuts), 1), last)], axis=1).T
    a, b = ends[:-1], ends[1:]
    runs = np.arange(len(a))[:, None]
    backward = tables.backward[a, b] + tables.replay[runs, a, b]
    return Costs(tables.forward[a, b], backward, tables.hop[cuts.T], tables.back[a, b])


def steps_of(problem: PartitionProblem, tables: Tables, cuts: Cuts) -> Numbers:
    """Seconds of a step of each cut, simulated; inf where it does not fit."""
    costs = costs_of(tables, cuts)
    fits = np.flatnonzero(np.isfinite(costs.backward).all(axis=0))
    found = np.full(len(cuts), np.inf)
    own = Costs(costs.forward[:, fits], costs.backward[:, fits], costs.hop[:, fits], costs.back[:, fits])
    found[fits] = simulate(problem.order, problem.stages, own)
    return found
