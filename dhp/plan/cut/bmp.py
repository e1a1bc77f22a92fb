"""Cuts by OmniBal's balanced model partition, or evenly."""

from collections.abc import Callable, Sequence
from itertools import product
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dhp.core.errors import ConfigError
from dhp.core.kinds import takes
from dhp.plan.cut.problem import Partition, PartitionProblem
from dhp.plan.cut.run_tables import Cuts, Path, Tables, costs_of, least_largest, least_sum, make_tables, steps_of
from dhp.plan.cut.units import Numbers, PinnedUnit, Positions, Unit

Score = Callable[[tuple[int, ...]], Sequence[float]]  # cuts by position → seconds of some steps; none: it does not fit
_MOST = 2_000_000  # candidates


def bmp(
    problem: PartitionProblem,
    score: Score | None = None,
    by: Literal["forward", "work"] = "forward",
    radius: int = 1,
    best: int = 15,
) -> Partition:
    """The cuts of the `best` candidates whose steps take the least seconds in the median. score: measures them; None to
    simulate. by: what is balanced, forward as published, or all of a stage's work.

    Raises ConfigError where none of them fits the budget, or a radius has too many candidates."""
    tables = make_tables(problem)
    cuts = _candidates(problem, tables, by, radius)
    chosen = cuts[np.argsort(_rank(problem, tables, cuts, by), kind="stable")[:best]]
    if score is None:
        steps = steps_of(problem, tables, chosen)
    else:
        named = [tuple(problem.positions.at[row].tolist()) for row in chosen]
        steps = np.array([np.median(score(one) or [np.inf]) for one in named])
    if not len(steps) or not np.isfinite(steps.min()):
        raise ConfigError(
            f"text.partition=bmp: none of the {len(chosen)} candidates within {radius} of equal {by} times fits the "
            "budget. Set text.partition=exact, which searches under it"
        )
    at = int(steps.argmin())
    return Partition(tuple(problem.positions.at[chosen[at]].tolist()), float(steps[at]), tried=len(chosen))


def _candidates(problem: PartitionProblem, tables: Tables, by: str, radius: int) -> Cuts:
    count = (2 * radius + 1) ** (problem.runs - 1)
    if count > _MOST:
        raise ConfigError(
            f"text.partition=bmp: a radius of {radius} around {problem.runs - 1} cuts has {count:,} candidates, more "
            f"than {_MOST:,}. Set text.partition=exact"
        )
    work = tables.forward[0] + (tables.backward[0] if by == "work" else 0.0)
    shares = np.arange(1, problem.runs) * work[-1] / problem.runs
    anchor = 1 + np.abs(work[None, 1:-1] - shares[:, None]).argmin(axis=1)
    if problem.held is not None:
        anchor = _within(anchor, problem.held, problem)
    moves = np.array(list(product(range(-radius, radius + 1), repeat=problem.runs - 1)), dtype=np.int_)
    cuts = anchor[None, :] + moves.reshape(-1, problem.runs - 1)
    last = len(tables.hop) - 1
    ends = np.pad(cuts, ((0, 0), (1, 1)), constant_values=((0, 0), (0, last)))
    cuts = cuts[(np.diff(ends, axis=1) > 0).all(axis=1)]
    return cuts[np.isfinite(costs_of(tables, cuts).backward).all(axis=0)]


def _within(anchor: NDArray[np.int_], held: PinnedUnit, problem: PartitionProblem) -> NDArray[np.int_]:
    """The nearest cuts under which the run holds its unit: as many of them before it as there are runs before."""
    inside = int(np.searchsorted(problem.positions.at, held.unit, side="right")) - 1  # the last position before it
    count, last = problem.runs - 1, len(problem.positions.at) - 1
    number = np.arange(count)
    before = number < held.run
    least = np.where(before, 1 + number, inside + 1 + number - held.run)
    most = np.where(before, inside + 1 + number - held.run, last - count + number)
    return np.clip(anchor, least, most)


def _rank(problem: PartitionProblem, tables: Tables, cuts: Cuts, by: str) -> Numbers:
    """VAR(fwd_time) + SUM(comm), eq. 4 and 5: squares of the deviations in ms, summed over stages, and hand-overs in
    MiB."""
    costs = costs_of(tables, cuts)
    seconds = costs.forward + (costs.backward if by == "work" else 0.0)
    stages = seconds.reshape(problem.runs // problem.stages, problem.stages, len(cuts)).sum(axis=0)
    output = np.array([0.0, *(unit.output_bytes for unit in problem.units)])[problem.positions.at]
    deviations = (stages - stages.mean(axis=0)) * 1e3
    found: Numbers = (deviations**2).sum(axis=0) + output[cuts].sum(axis=1) / 2**20
    return found


def by_parameters(units: Sequence[Unit], runs: int, held: PinnedUnit | None = None) -> tuple[int, ...]:
    """The cuts for which the largest run has as few parameters as possible; of several, those whose first runs are
    smallest, since the first stages of 1F1B hold most micro-batches. held: a unit that one run must hold.
    Raises ConfigError for more runs than units."""
    positions = Positions(units)
    sizes = positions.sums([unit.parameters for unit in units])
    costs = np.where(positions.of_runs(runs, held), sizes, np.inf)
    return _as_cuts(positions, least_largest(costs), runs)


def by_layers(units: Sequence[Unit], runs: int, held: PinnedUnit | None = None) -> tuple[int, ...]:
    """The cuts for which the runs' numbers of layers have the least variance. Raises as `by_parameters`."""
    return least_variance(units, runs, held, [unit.layers for unit in units])


def least_variance(
    units: Sequence[Unit], runs: int, held: PinnedUnit | None, values: Sequence[float]
) -> tuple[int, ...]:
    """The cuts for which the runs' sums of a value of each unit have the least variance. Raises as `by_parameters`."""
    positions = Positions(units)
    costs = (positions.sums(values) - sum(values) / runs) ** 2
    costs = np.where(positions.of_runs(runs, held), costs, np.inf)
    return _as_cuts(positions, least_sum(costs), runs)


def _as_cuts(positions: Positions, found: tuple[float, Path], runs: int) -> tuple[int, ...]:
    value, path = found
    if not np.isfinite(value):
        places = len(positions.at) - 2
        raise ConfigError(
            f"a chain with {places} places to cut cannot be cut into {runs} runs: {places} + 1 >= runs({runs}) does "
            "not hold, or a part has fewer layers than stages. Set text.pipeline lower"
        )
    return tuple(int(positions.at[index]) for index in path)


# text.partition by name, for those that need no schedule: units, runs, the unit that one run must hold → cuts.
PARTITION_METHODS: dict[str, Callable[[Sequence[Unit], int, PinnedUnit | None], tuple[int, ...]]] = {
    "parameters": by_parameters
}
takes("text.partition", PARTITION_METHODS)
