"""Best-fit decreasing: samples for which no balanced pack exists, into as few packs as their text allows."""

from __future__ import annotations

import numpy as np
from numba import njit

LEVELS = 4096  # of a bin's room. Sizes are rounded up to them, but for whole sizes with a limit up to MOST_EXACT
MOST_EXACT = 65536


def best_fit(sizes: np.ndarray, limit: float) -> np.ndarray:
    """The bin of each item, int64 [items]; an item beyond the limit has a bin of its own.

    Johnson et al. 1974. The fullest bin that has room takes the next largest item; bins are found by their room, so
    the cost is linear in the items for a fixed number of levels.
    """
    whole = limit <= MOST_EXACT and float(limit).is_integer() and not np.any(sizes % 1)
    levels = int(limit) if whole else LEVELS
    units = np.minimum(np.ceil(sizes * (levels / limit)), levels).astype(np.int64)
    number = np.empty(len(sizes), dtype=np.int64)
    order = np.argsort(-units, kind="stable")
    number[order] = _fit(units[order], levels)
    return number


@njit(cache=True)
def _fit(units: np.ndarray, levels: int) -> np.ndarray:  # pragma: no cover - compiled
    head = np.full(levels + 1, -1, np.int64)  # by room: the first bin with just that room
    following = np.full(len(units), -1, np.int64)
    number = np.empty(len(units), np.int64)
    bins = 0
    for item in range(len(units)):
        room = units[item]
        while room <= levels and head[room] < 0:
            room += 1
        if room > levels:
            bin_ = bins
            bins += 1
            room = levels
        else:
            bin_ = head[room]
            head[room] = following[bin_]
        number[item] = bin_
        left = room - units[item]
        following[bin_] = head[left]
        head[left] = bin_
    return number
