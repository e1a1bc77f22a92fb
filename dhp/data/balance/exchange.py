"""Balances bins by paired exchange.

Each pass sorts the bins by one view of their loads, pairs the heaviest with the lightest, the second with the second
and so on, and applies to each pair the one swap or move that lowers Σ_k w_k (load_k / target_k − 1)² most. A bin is
in one pair of a pass, so a pass is linear in the items, but for sorting the bins. Deterministic."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit

from dhp.data.balance.packs import Packs

SPARE_ITEMS = 8  # items that a bin may hold beyond the mean number: free slots for moves
DIVIDED_ITEMS = 10  # two bins of no more items together are divided anew in all ways
ENOUGH_DEVIATION = 1e-3  # of a bin's load from its target, relative: below it the bin counts as even
RESOLUTION = 1e6  # loads are sorted in steps of 1 / RESOLUTION of the target
EMPTY = -1  # no item: at an empty slot of a bin, or on one side of a move
STAY = -2  # in the place of an item: no exchange is better


class _Bins(NamedTuple):
    """The items of each bin.

    held: int32 [bins, slots], the items, then EMPTY. counts: int32 [bins], how many items. sums: float64 [bins,
    features], their load."""

    held: np.ndarray
    counts: np.ndarray
    sums: np.ndarray


class _Goal(NamedTuple):
    """The target of all bins: 1 of each feature.

    loads: float64 [items, features], relative to the target of a bin. weights: float64 [features], of deviations."""

    loads: np.ndarray
    weights: np.ndarray


def exchange(
    loads: np.ndarray,
    bins: int,
    targets: Sequence[float],
    weights: Sequence[float],
    passes: int,
    divisions: int = 0,
    moves: bool = True,
) -> Packs:
    """Items in bins. Bins that get no item are left out.

    loads: float64 [items, features]. targets, weights: by feature, the most important one last. divisions: further
    passes, in which two bins of few items are divided anew in the best of all ways; after the first of them, only where
    one of the two deviates by ENOUGH_DEVIATION or more. moves: items may change bins alone; otherwise there are only
    swaps, and the counts of bins stay within one of each other."""
    goal = _Goal(loads / np.asarray(targets, dtype=np.float64), np.asarray(weights, dtype=np.float64))
    held, counts = _distribute(_order(-(goal.loads @ np.sqrt(goal.weights))), bins)
    made = _Bins(held, counts, _sum_up(held, counts, goal.loads))
    if not moves and (loads == loads[0]).all():
        passes = 0  # no swap of equal items makes bins more even
    views = _views(len(targets))
    for turn in range(passes):
        _swap_pairs(_order(made.sums @ views[turn % len(views)]), made, goal, moves)
    for turn in range(divisions):
        enough = ENOUGH_DEVIATION if turn else 0.0
        _divide_pairs(_order(made.sums @ views[turn % len(views)]), made, goal, enough)
    inside = np.arange(held.shape[1]) < counts[:, None]
    full = counts > 0
    return Packs(held[inside].astype(np.int64), np.cumsum(counts[full], dtype=np.int64))


def _order(keys: np.ndarray) -> np.ndarray:
    """As argsort, equal ones in order. Sorting whole numbers is much faster, and the same on every machine."""
    rounded = np.round(keys * RESOLUTION).astype(np.int64)
    return np.sort((rounded - rounded.min()) * len(keys) + np.arange(len(keys))) % len(keys)


def _views(features: int) -> np.ndarray:
    """Directions to sort bins along: the last feature, and every other one added to it and taken from it."""
    last = np.eye(features)[-1]
    others = np.eye(features)[:-1]
    return np.stack([last, *(last + other for other in others), *(last - other for other in others)])


def _distribute(order: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """Distribute items in rounds over the bins, every other round backwards: [bins, room] and counts."""
    items = len(order)
    rounds = -(-items // bins)
    held = np.full((bins, rounds + SPARE_ITEMS), EMPTY, dtype=np.int32)
    padded = np.full(rounds * bins, EMPTY, dtype=np.int32)
    padded[:items] = order
    table = padded.reshape(rounds, bins)
    table[1::2] = table[1::2, ::-1]
    held[:, :rounds] = table.T
    counts = (held[:, :rounds] != EMPTY).sum(axis=1).astype(np.int32)
    return held, counts  # the last, shorter round is the only one with gaps, so each bin's items stand first


@njit(cache=True)
def _sum_up(held: np.ndarray, counts: np.ndarray, loads: np.ndarray) -> np.ndarray:  # pragma: no cover - compiled
    """Loads of the bins: [bins, features]."""
    sums = np.zeros((len(counts), loads.shape[1]))
    for bin_ in range(len(counts)):
        for slot in range(counts[bin_]):
            for k in range(loads.shape[1]):
                sums[bin_, k] += loads[held[bin_, slot], k]
    return sums


@njit(cache=True)
def _swap_pairs(order: np.ndarray, bins: _Bins, goal: _Goal, moves: bool) -> None:  # pragma: no cover - compiled
    for index in range(len(order) // 2):
        one, other = order[index], order[len(order) - 1 - index]
        i, j = _best_exchange(bins, goal, one, other, moves)
        if i != STAY:
            _apply_exchange(bins, goal, one, other, i, j)


@njit(cache=True)
def _best_exchange(
    bins: _Bins, goal: _Goal, one: int, other: int, moves: bool
) -> tuple[int, int]:  # pragma: no cover - compiled
    """The slots of two bins whose items should change sides: EMPTY for a bin that gives none, STAY if nothing should
    change."""
    held, counts, sums = bins
    loads, weights = goal
    best, best_i, best_j = _cost(sums, goal, one, other) - 1e-12, STAY, STAY  # only what is really better
    first = EMPTY if moves else 0
    for i in range(first, counts[one]):
        for j in range(first, counts[other]):
            if (i < 0 or j < 0) and not _may_move(bins, one, other, i, j):
                continue
            cost = 0.0
            for k in range(len(weights)):
                shift = _shift(held, loads, one, other, i, j, k)
                cost += weights[k] * ((sums[one, k] - shift - 1.0) ** 2 + (sums[other, k] + shift - 1.0) ** 2)
                if cost >= best:
                    break
            if cost < best:
                best, best_i, best_j = cost, i, j
    return best_i, best_j


@njit(cache=True)
def _cost(sums: np.ndarray, goal: _Goal, one: int, other: int) -> float:  # pragma: no cover - compiled
    cost = 0.0
    for k in range(len(goal.weights)):
        cost += goal.weights[k] * ((sums[one, k] - 1.0) ** 2 + (sums[other, k] - 1.0) ** 2)
    return cost


@njit(cache=True)
def _may_move(bins: _Bins, one: int, other: int, i: int, j: int) -> bool:  # pragma: no cover - compiled
    """Whether an item may change sides alone: its bin keeps another one, and the other bin has a free slot."""
    counts, slots = bins.counts, bins.held.shape[1]
    if i < 0 and j < 0:
        return False
    if i < 0:
        return counts[one] < slots and counts[other] >= 2
    return counts[other] < slots and counts[one] >= 2


@njit(cache=True)
def _shift(
    held: np.ndarray, loads: np.ndarray, one: int, other: int, i: int, j: int, k: int
) -> float:  # pragma: no cover - compiled
    """Load of feature k that goes from one bin to the other."""
    shift = 0.0
    if i >= 0:
        shift += loads[held[one, i], k]
    if j >= 0:
        shift -= loads[held[other, j], k]
    return shift


@njit(cache=True)
def _apply_exchange(
    bins: _Bins, goal: _Goal, one: int, other: int, i: int, j: int
) -> None:  # pragma: no cover - compiled
    held = bins.held
    for k in range(len(goal.weights)):
        shift = _shift(held, goal.loads, one, other, i, j, k)
        bins.sums[one, k] -= shift
        bins.sums[other, k] += shift
    if i >= 0 and j >= 0:
        held[one, i], held[other, j] = held[other, j], held[one, i]
    elif i >= 0:
        _move(bins, one, i, other)
    else:
        _move(bins, other, j, one)


@njit(cache=True)
def _move(bins: _Bins, source: int, slot: int, target: int) -> None:  # pragma: no cover - compiled
    """An item goes to the end of another bin, and the last one of its own takes its slot."""
    held, counts = bins.held, bins.counts
    held[target, counts[target]] = held[source, slot]
    counts[target] += 1
    counts[source] -= 1
    held[source, slot] = held[source, counts[source]]
    held[source, counts[source]] = EMPTY


@njit(cache=True)
def _divide_pairs(order: np.ndarray, bins: _Bins, goal: _Goal, enough: float) -> None:  # pragma: no cover - compiled
    """One pass: of each pair of bins with few items, the best of all divisions, in place. enough: as in `_is_even`."""
    held, counts = bins.held, bins.counts
    items = np.empty(DIVIDED_ITEMS, np.int32)
    for index in range(len(order) // 2):
        one, other = order[index], order[len(order) - 1 - index]
        count = counts[one] + counts[other]
        if count > DIVIDED_ITEMS or count > held.shape[1] or count < 2 or _is_even(bins.sums, one, other, enough):
            continue
        for slot in range(counts[one]):
            items[slot] = held[one, slot]
        for slot in range(counts[other]):
            items[counts[one] + slot] = held[other, slot]
        chosen = _best_division(bins.sums, goal, one, other, items, count)
        if chosen:
            _apply_division(bins, goal, one, other, items, count, chosen)


@njit(cache=True)
def _is_even(sums: np.ndarray, one: int, other: int, enough: float) -> bool:  # pragma: no cover - compiled
    for k in range(sums.shape[1]):
        if max(abs(sums[one, k] - 1.0), abs(sums[other, k] - 1.0)) >= enough:
            return False
    return True


@njit(cache=True)
def _best_division(
    sums: np.ndarray, goal: _Goal, one: int, other: int, items: np.ndarray, count: int
) -> int:  # pragma: no cover - compiled
    """Which of the items of two bins should be in the first of them, a bit an item; 0: they should stay as they are."""
    loads, weights = goal
    features = len(weights)
    total, part = np.empty(features), np.zeros(features)
    for k in range(features):
        total[k] = sums[one, k] + sums[other, k]
    best, chosen = _cost(sums, goal, one, other), 0
    # The last item stays where it is: a division and its mirror image are one.
    for turn in range(1, 1 << (count - 1)):
        bit = 0
        while not (turn >> bit) & 1:  # Gray code: one item changes sides each time
            bit += 1
        sign = -1.0 if ((turn ^ (turn >> 1)) >> bit) & 1 == 0 else 1.0
        cost = 0.0
        for k in range(features):
            part[k] += sign * loads[items[bit], k]
            cost += weights[k] * ((part[k] - 1.0) ** 2 + (total[k] - part[k] - 1.0) ** 2)
        if cost < best:
            best, chosen = cost, turn ^ (turn >> 1)
    return chosen


@njit(cache=True)
def _apply_division(
    bins: _Bins, goal: _Goal, one: int, other: int, items: np.ndarray, count: int, chosen: int
) -> None:  # pragma: no cover - compiled
    held, counts, sums = bins
    counts[one] = counts[other] = 0
    for k in range(len(goal.weights)):
        sums[one, k] = sums[other, k] = 0.0
    for n in range(count):
        bin_ = one if (chosen >> n) & 1 else other
        held[bin_, counts[bin_]] = items[n]
        counts[bin_] += 1
        for k in range(len(goal.weights)):
            sums[bin_, k] += goal.loads[items[n], k]
    for bin_ in (one, other):
        for slot in range(counts[bin_], held.shape[1]):
            held[bin_, slot] = EMPTY
