"""Ways through a chain: dynamic programming over [runs, a, b], what it costs that run k holds the units from a to b."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dhp.planner.units import Numbers

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
