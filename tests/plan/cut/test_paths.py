"""Ways through a chain against all of them."""

from itertools import combinations

import numpy as np
import pytest

from dhp.plan.cut.run_tables import Path, below, count_below, least_largest, least_sum, limit_for
from dhp.plan.cut.units import Numbers

RUNS, SIZE = 4, 9


def made(seed: int) -> Numbers:
    """Costs of whole numbers, some inf."""
    rng = np.random.default_rng(seed)
    costs = rng.integers(1, 9, (RUNS, SIZE, SIZE)).astype(float)
    costs[rng.random(costs.shape) < 0.1] = np.inf
    costs[:, np.arange(SIZE)[:, None] >= np.arange(SIZE)[None, :]] = np.inf
    return costs


def every(costs: Numbers) -> dict[Path, list[float]]:
    """All paths, with the costs of each of their runs."""
    found = {}
    for path in combinations(range(1, SIZE - 1), RUNS - 1):
        ends = [0, *path, SIZE - 1]
        found[path] = [float(costs[k, a, b]) for k, (a, b) in enumerate(zip(ends, ends[1:]))]
    return found


@pytest.mark.parametrize("seed", range(5))
def test_no_path_is_better(seed: int) -> None:
    costs = made(seed)
    paths = every(costs)
    largest, path = least_largest(costs)
    assert largest == min(map(max, paths.values())) == max(paths[path])
    total, path = least_sum(costs)
    assert total == min(map(sum, paths.values())) == sum(paths[path])


@pytest.mark.parametrize("seed", range(5))
def test_those_below_a_limit_are_all_of_them(seed: int) -> None:
    costs = made(seed)
    wanted = {path: max(own) for path, own in every(costs).items() if max(own) < 8}
    paths, largest = below(costs, 8.0)
    assert dict(zip(map(tuple, paths.tolist()), largest, strict=True)) == wanted and len(wanted) > 3
    assert (np.diff(largest) >= 0).all() and count_below(costs, 8.0) == len(wanted)
    limit = limit_for(costs, 3, 8.0)
    assert count_below(costs, limit) <= 3 and count_below(costs, limit + 1e-6) > 3
    assert limit_for(costs, len(wanted), 8.0) == 8.0


def test_no_path_is_said_by_inf() -> None:
    nothing = np.full((RUNS, SIZE, SIZE), np.inf)
    assert least_largest(nothing) == (np.inf, ()) and least_sum(nothing) == (np.inf, ())
    assert len(below(nothing, 1.0)[0]) == 0
