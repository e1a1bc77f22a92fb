"""Cuts that make stages alike in one figure, without a schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from dhp.core.errors import ConfigError
from dhp.core.plugins import takes
from dhp.planner.partition.paths import Path, least_largest, least_sum
from dhp.planner.units import Held, Positions, Unit


def by_parameters(units: Sequence[Unit], runs: int, held: Held | None = None) -> tuple[int, ...]:
    """The cuts for which the largest run has as few parameters as possible; of several, those whose first runs are
    smallest, since the first stages of 1F1B hold most micro-batches. held: a unit that one run must hold.
    Raises ConfigError for more runs than units."""
    positions = Positions(units)
    sizes = positions.sums([unit.parameters for unit in units])
    costs = np.where(positions.of_runs(runs, held), sizes, np.inf)
    return _as_cuts(positions, least_largest(costs), runs)


def by_layers(units: Sequence[Unit], runs: int, held: Held | None = None) -> tuple[int, ...]:
    """The cuts for which the runs' numbers of layers have the least variance. Raises as `by_parameters`."""
    return least_variance(units, runs, held, [unit.layers for unit in units])


def least_variance(units: Sequence[Unit], runs: int, held: Held | None, values: Sequence[float]) -> tuple[int, ...]:
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
PARTITION_METHODS: dict[str, Callable[[Sequence[Unit], int, Held | None], tuple[int, ...]]] = {
    "parameters": by_parameters
}
takes("text.partition", PARTITION_METHODS)
