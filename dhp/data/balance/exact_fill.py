"""Bins of exact load: items at random until two are missing, then the two that complete the bin exactly.

What an exact completion needs is at hand by its load, so it costs a look and no search: each bin tries a few items
for the last item but one, and of those whose complement is there takes the one that brings the sum of squares
nearest to its own target. Works where loads are whole numbers and many items have each; others stay for `exchange`.
"""

from __future__ import annotations

import numpy as np
from numba import njit

TRIED_ITEMS = 24  # items tried for the last item but one
LOOKED_AT = 16 * TRIED_ITEMS  # items passed over, used ones included, before a bin is given up
MISSING = 2.5  # mean items that a bin still has room for when its completion is tried
BUCKETS = 1 << 23  # more different loads than this, and hardly any item has its complement
MOST_ITEMS = 512  # in a bin
ROOMY = 1.15
PLENTY = 0.95  # quantile of loads up to which there are items enough to count on
UNUSED, GIVEN_UP = -1, -2


def exact_fill(count: np.ndarray, load: np.ndarray, counts: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The number of each item's bin, or −1: int64 [items]. Items must come in random order.

    count, load: int64 [items], not negative. counts, targets: int64 [bins], what a bin holds of them, exactly. Bins are
    filled in order; one that cannot be filled stays empty, and the items tried for it are left over.
    """
    number = np.full(len(load), UNUSED, dtype=np.int64)
    width = int(load.max(initial=0)) + 1
    if not len(load) or (int(count.max()) + 1) * width > BUCKETS:
        return number
    squares = float((load.astype(np.float64) ** 2).sum() / max(load.sum(), 1))
    keys = count * width + load
    live = np.bincount(keys, minlength=(int(count.max()) + 1) * width)
    order = np.argsort(keys, kind="stable")
    starts = np.cumsum(live) - live
    most = int(np.quantile(load, PLENTY))
    # Only where what is counted are the items themselves, and where many are well above the mean: else small items
    # would have to wait for the last bins, which then are unlike all others.
    if not (count == 1).all() or most * counts.sum() < ROOMY * targets.sum():
        most = width * MOST_ITEMS
    _fill(count, load, counts, targets, squares, float(load.mean()), most, width, order, starts, live, number)
    return np.maximum(number, UNUSED)


@njit(cache=True)
def _fill(
    count: np.ndarray,
    load: np.ndarray,
    counts: np.ndarray,
    targets: np.ndarray,
    squares: float,
    mean: float,
    most: int,
    width: int,
    order: np.ndarray,
    starts: np.ndarray,
    live: np.ndarray,
    number: np.ndarray,
) -> None:  # pragma: no cover - compiled
    """Fills bin by bin, and writes `number`. squares: Σ load² over Σ load. order: the items by key, which is
    count × width + load. starts, live: of each key, where its items start in the order, and how many are left."""
    first = 0
    held = np.empty(MOST_ITEMS, np.int64)
    for bin_ in range(len(targets)):
        while first < len(load) and number[first] != UNUSED:
            first += 1
        c, t, s = counts[bin_], targets[bin_], squares * targets[bin_]
        size, cursor, complete = 0, first, False
        while size < MOST_ITEMS:
            if t <= MISSING * mean:
                one, key = _completion(count, load, c, t, s, width, live, number, cursor)
                if key >= 0:
                    if one >= 0:
                        number[one] = bin_
                        live[count[one] * width + load[one]] -= 1
                    while number[order[starts[key]]] != UNUSED:
                        starts[key] += 1
                    number[order[starts[key]]] = bin_
                    live[key] -= 1
                    complete = True
                    break
            cursor = _next(count, load, c, t, most, number, cursor)
            if cursor < 0:
                break
            c, t, s = c - count[cursor], t - load[cursor], s - float(load[cursor]) ** 2
            number[cursor] = bin_
            live[count[cursor] * width + load[cursor]] -= 1
            held[size] = cursor
            size += 1
        if not complete:
            for n in range(size):
                number[held[n]] = GIVEN_UP
            if size == 0 and first < len(load):  # or the next bin would fail at the same item
                number[first] = GIVEN_UP
                live[count[first] * width + load[first]] -= 1


@njit(cache=True)
def _next(
    count: np.ndarray, load: np.ndarray, c: int, t: int, most: int, number: np.ndarray, cursor: int
) -> int:  # pragma: no cover - compiled
    """The next item that fits and leaves room for another one; −1 if there is none near. most: load
    that an item still to come may be counted on for: two small ones in a bin of few would never be completed."""
    for item in range(cursor, min(cursor + LOOKED_AT, len(load))):
        if number[item] == UNUSED and load[item] < t and count[item] <= c:
            if t - load[item] <= max(c - count[item], 1) * most:
                return item
    return -1


@njit(cache=True)
def _completion(
    count: np.ndarray,
    load: np.ndarray,
    c: int,
    t: int,
    s: float,
    width: int,
    live: np.ndarray,
    number: np.ndarray,
    cursor: int,
) -> tuple[int, int]:  # pragma: no cover - compiled
    """An item, or −1 if one alone completes the bin, and the key of the last one; −1 as key if there is none."""
    best, chosen, last = np.inf, -1, -1
    if t < width and c * width + t < len(live) and live[c * width + t] > 0:
        best, last = abs(s - float(t) ** 2), c * width + t
    tried = 0
    for item in range(cursor, min(cursor + LOOKED_AT, len(load))):
        if number[item] != UNUSED:
            continue
        tried += 1
        if tried > TRIED_ITEMS:
            break
        left = t - load[item]
        if count[item] > c or left < 0 or left >= width:
            continue
        key = (c - count[item]) * width + left
        if key >= len(live) or live[key] <= (1 if key == count[item] * width + load[item] else 0):
            continue
        cost = abs(s - float(load[item]) ** 2 - float(left) ** 2)
        if cost < best:
            best, chosen, last = cost, item, key
    return chosen, last
