"""Seconds of every run of units that may be a stage, by the positions of its ends, recompute under the budget included.

A stage's bytes are those of its states, what all its micro-batches in flight keep, and, where it recomputes anything,
the largest replay of any of its units, as if that came while all of them are held. So its choices depend on no other
stage's, and a step of fixed programs is no shorter for slower stages: the least seconds of each stage are the best.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from math import comb

import numpy as np
from numpy.typing import NDArray

from dhp.core.errors import ConfigError
from dhp.planner.partition.fronts import Fronts
from dhp.planner.partition.paths import least_largest
from dhp.planner.partition.problem import PartitionProblem, bounds_of
from dhp.planner.partition.simulate import Costs, simulate
from dhp.planner.units import Numbers, Unit

Cuts = NDArray[np.int_]  # [K, runs - 1]: indices of positions


@dataclass(frozen=True)
class Tables:
    """Of a problem, by indices of its positions: [a, b] for the units from `at[a]` to `at[b]`.

    forward, backward: seconds. replay: [runs, a, b], seconds of recomputing; inf where the run must not be, or does not
    fit. back: whether a backward visits it. hop: [a], of a hand-over there.
    """

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
