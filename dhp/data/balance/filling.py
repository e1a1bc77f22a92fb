"""Fills bins to a given load, exactly where possible.

A table finds items by their load, so completing a bin needs no search. Each bin tries a few items for its last but
one. Some of them have a complement, an item of just the load that is then missing; of these the bin takes the one that
brings its sum of squares nearest to a target of its own. This works where loads are whole numbers and each load has
many items; other items stay for `exchange`."""

from typing import NamedTuple

import numpy as np
from numba import njit

TRIED_ITEMS = 24  # for the last item but one
LOOKED_AT = 16 * TRIED_ITEMS  # items passed over, used ones included, before a bin is given up
MISSING = 2.5  # times the mean load: once a bin has no more room than that, its completion is tried
BUCKETS = 1 << 23  # with more different loads than this, hardly any item has its complement
MOST_ITEMS = 512  # in a bin
PLENTY = 0.95  # quantile of the loads: items up to it are many, so a bin may count on getting one of them later
ROOMY = 1.15  # bins may count on such items only where bins of nothing else would hold this many times their targets
UNUSED, GIVEN_UP = -1, -2  # an item that is in no bin yet, and one that never will be


class _Items(NamedTuple):
    """counts, load: int64 [items]. number: int64 [items], the bin of each, written as bins are filled."""

    counts: np.ndarray
    load: np.ndarray
    number: np.ndarray


class _Table(NamedTuple):
    """Items by key, which is count × width + load.

    order: int64 [items], sorted by key. starts: int64 [keys], where the items of a key start in the order. live: int64
    [keys], how many of them are in no bin."""

    width: int
    order: np.ndarray
    starts: np.ndarray
    live: np.ndarray


class _Guide(NamedTuple):
    """Statistics that guide the choice of items.

    mean: load of an item. squares: Σ load² over Σ load. most: largest load that a bin may expect of an item that it
    does not have yet."""

    mean: float
    squares: float
    most: int


def exact_fill(count: np.ndarray, load: np.ndarray, counts: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The number of each item's bin, or −1: int64 [items]. Items must come in random order.

    count, load: int64 [items], not negative. counts, targets: int64 [bins], what a bin holds of them, exactly. Bins are
    filled in order; one that cannot be filled stays empty, and the items tried for it are left over."""
    items = _Items(count, load, np.full(len(load), UNUSED, dtype=np.int64))
    width = int(load.max(initial=0)) + 1
    if not len(load) or (int(count.max()) + 1) * width > BUCKETS:
        return items.number
    keys = count * width + load
    live = np.bincount(keys, minlength=(int(count.max()) + 1) * width)
    table = _Table(width, np.argsort(keys, kind="stable"), np.cumsum(live) - live, live)
    most = int(np.quantile(load, PLENTY))
    # Only where what is counted are the items themselves, and where many are well above the mean: else small items
    # would have to wait for the last bins, which then are unlike all others.
    if not (count == 1).all() or most * counts.sum() < ROOMY * targets.sum():
        most = width * MOST_ITEMS
    squares = float((load.astype(np.float64) ** 2).sum() / max(load.sum(), 1))
    _fill(items, table, _Guide(float(load.mean()), squares, most), counts, targets)
    return np.maximum(items.number, UNUSED)


@njit(cache=True)
def _fill(
    items: _Items, table: _Table, guide: _Guide, counts: np.ndarray, targets: np.ndarray
) -> None:  # pragma: no cover - compiled
    """Fill bin by bin; `items.number` and `table` say what is used."""
    first = 0
    held = np.empty(MOST_ITEMS, np.int64)
    for bin_ in range(len(targets)):
        while first < len(items.load) and items.number[first] != UNUSED:
            first += 1
        size, complete = _fill_bin(items, table, guide, bin_, counts[bin_], targets[bin_], first, held)
        if complete:
            continue
        for n in range(size):
            items.number[held[n]] = GIVEN_UP
        if size == 0 and first < len(items.load):  # or the next bin would fail at the same item
            _take(items, table, first, GIVEN_UP)


@njit(cache=True)
def _fill_bin(
    items: _Items, table: _Table, guide: _Guide, bin_: int, c: int, t: int, first: int, held: np.ndarray
) -> tuple[int, bool]:  # pragma: no cover - compiled
    """Put items from `first` on into a bin that is to hold c in count and t in load.

    Returns how many items it took before the completing ones, which `held` lists, and whether it is complete."""
    s = guide.squares * t
    size, cursor = 0, first
    while size < MOST_ITEMS:
        if t <= MISSING * guide.mean:
            one, key = _completion(items, table, c, t, s, cursor)
            if key >= 0:
                if one >= 0:
                    _take(items, table, one, bin_)
                while items.number[table.order[table.starts[key]]] != UNUSED:
                    table.starts[key] += 1
                _take(items, table, table.order[table.starts[key]], bin_)
                return size, True
        cursor = _next(items, c, t, guide.most, cursor)
        if cursor < 0:
            break
        c, t, s = c - items.counts[cursor], t - items.load[cursor], s - float(items.load[cursor]) ** 2
        _take(items, table, cursor, bin_)
        held[size] = cursor
        size += 1
    return size, False


@njit(cache=True)
def _take(items: _Items, table: _Table, item: int, bin_: int) -> None:  # pragma: no cover - compiled
    items.number[item] = bin_
    table.live[items.counts[item] * table.width + items.load[item]] -= 1


@njit(cache=True)
def _next(items: _Items, c: int, t: int, most: int, cursor: int) -> int:  # pragma: no cover - compiled
    """The next item that fits and leaves room for another one; −1 if there is none near.

    most: as in `_Guide`. A bin of few items that begins with small ones would never be completed."""
    count, load, number = items
    for item in range(cursor, min(cursor + LOOKED_AT, len(load))):
        if number[item] == UNUSED and load[item] < t and count[item] <= c:
            if t - load[item] <= max(c - count[item], 1) * most:
                return item
    return -1


@njit(cache=True)
def _completion(
    items: _Items, table: _Table, c: int, t: int, s: float, cursor: int
) -> tuple[int, int]:  # pragma: no cover - compiled
    """The last item but one, −1 if one item alone completes the bin, and the key of the last item, −1 if no two do."""
    count, load, number = items
    width, live = table.width, table.live
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


LEVELS = 4096  # of a bin's room. Sizes are rounded up to them, but for whole sizes with a limit up to MOST_EXACT
MOST_EXACT = 65536


def best_fit(sizes: np.ndarray, limit: float) -> np.ndarray:
    """The bin of each item, int64 [items]; an item beyond the limit has a bin of its own.

    Johnson et al. 1974. The fullest bin that has room takes the next largest item; bins are found by their room, so
    the cost is linear in the items for a fixed number of levels."""
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
