"""Bins of equal load by paired exchange: deal the items out by size, then let heavy and light bins swap.

Each pass sorts the bins by one view of their loads, pairs the heaviest with the lightest, the second with the second
and so on, and applies to each pair the one swap or move that lowers Σ_k w_k (load_k / target_k − 1)² most. A bin is
in one pair of a pass, so a pass is linear in the items, but for sorting the bins. Deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numba import njit

from dhp.data.balance.packs import Packs

SPARE_ITEMS = 8  # items that a bin may have beyond the mean: what moves need
DIVIDED_ITEMS = 10  # items of two bins, all divisions of which are tried
ENOUGH_DEVIATION = 1e-3  # relative deviation of a bin that no further pass is spent on
RESOLUTION = 1e6  # of loads, relative to the target, when they are sorted
NOTHING = -1


def exchange(
    loads: np.ndarray,
    bins: int,
    targets: Sequence[float],
    weights: Sequence[float],
    passes: int,
    divisions: int = 0,
    moves: bool = True,
) -> Packs:
    """Items in bins. loads: float64 [items, features]; targets and weights by feature, the most important one last.

    divisions: further passes, in which two bins of few items are divided anew in the best of all ways, unless both are
    even to ENOUGH_DEVIATION after the first pass. moves: items may change bins alone; otherwise only swaps, so counts stay
    within one of each other. Bins that get no item are left out.
    """
    relative = loads / np.asarray(targets, dtype=np.float64)
    weights = np.asarray(weights, dtype=np.float64)
    held, counts = _deal(_order(-(relative @ np.sqrt(weights))), bins)
    sums = _sum_up(held, counts, relative)
    views = _views(len(targets))
    for turn in range(passes):
        _swap_pairs(_order(sums @ views[turn % len(views)]), held, counts, sums, relative, weights, moves)
    for turn in range(divisions):
        enough = ENOUGH_DEVIATION if turn else 0.0
        _divide_pairs(_order(sums @ views[turn % len(views)]), held, counts, sums, relative, weights, enough)
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


def _deal(order: np.ndarray, bins: int) -> tuple[np.ndarray, np.ndarray]:
    """Items in rounds over the bins, every other round backwards: [bins, room] and counts."""
    items = len(order)
    rounds = -(-items // bins)
    held = np.full((bins, rounds + SPARE_ITEMS), NOTHING, dtype=np.int32)
    padded = np.full(rounds * bins, NOTHING, dtype=np.int32)
    padded[:items] = order
    table = padded.reshape(rounds, bins)
    table[1::2] = table[1::2, ::-1]
    held[:, :rounds] = table.T
    counts = (held[:, :rounds] != NOTHING).sum(axis=1).astype(np.int32)
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
def _swap_pairs(
    order: np.ndarray,
    held: np.ndarray,
    counts: np.ndarray,
    sums: np.ndarray,
    loads: np.ndarray,
    weights: np.ndarray,
    moves: bool,
) -> None:  # pragma: no cover - compiled
    """One pass: the best exchange of each pair of bins, in place."""
    features = loads.shape[1]
    room = held.shape[1]
    for index in range(len(order) // 2):
        one, other = order[index], order[len(order) - 1 - index]
        best, best_i, best_j = 0.0, -2, -2
        for k in range(features):
            best += weights[k] * ((sums[one, k] - 1.0) ** 2 + (sums[other, k] - 1.0) ** 2)
        best -= 1e-12  # only what is really better
        first = -1 if moves else 0
        for i in range(first, counts[one]):
            for j in range(first, counts[other]):
                if i < 0 and j < 0:
                    continue
                if (i < 0 and (counts[one] >= room or counts[other] < 2)) or (
                    j < 0 and (counts[other] >= room or counts[one] < 2)
                ):
                    continue
                cost = 0.0
                for k in range(features):
                    shift = 0.0
                    if i >= 0:
                        shift += loads[held[one, i], k]
                    if j >= 0:
                        shift -= loads[held[other, j], k]
                    cost += weights[k] * ((sums[one, k] - shift - 1.0) ** 2 + (sums[other, k] + shift - 1.0) ** 2)
                    if cost >= best:
                        break
                if cost < best:
                    best, best_i, best_j = cost, i, j
        if best_i == -2:
            continue
        for k in range(features):
            shift = 0.0
            if best_i >= 0:
                shift += loads[held[one, best_i], k]
            if best_j >= 0:
                shift -= loads[held[other, best_j], k]
            sums[one, k] -= shift
            sums[other, k] += shift
        if best_i >= 0 and best_j >= 0:
            held[one, best_i], held[other, best_j] = held[other, best_j], held[one, best_i]
        elif best_i >= 0:
            held[other, counts[other]] = held[one, best_i]
            counts[other] += 1
            counts[one] -= 1
            held[one, best_i] = held[one, counts[one]]
            held[one, counts[one]] = -1
        else:
            held[one, counts[one]] = held[other, best_j]
            counts[one] += 1
            counts[other] -= 1
            held[other, best_j] = held[other, counts[other]]
            held[other, counts[other]] = -1


@njit(cache=True)
def _divide_pairs(
    order: np.ndarray,
    held: np.ndarray,
    counts: np.ndarray,
    sums: np.ndarray,
    loads: np.ndarray,
    weights: np.ndarray,
    enough: float,
) -> None:  # pragma: no cover - compiled
    """One pass: of each pair of bins with few items, the best of all divisions, in place."""
    features = loads.shape[1]
    items = np.empty(DIVIDED_ITEMS, np.int32)
    part = np.empty(features)
    total = np.empty(features)
    for index in range(len(order) // 2):
        one, other = order[index], order[len(order) - 1 - index]
        count = counts[one] + counts[other]
        if count > DIVIDED_ITEMS or count > held.shape[1] or count < 2:
            continue
        best = 0.0
        for k in range(features):
            best += weights[k] * ((sums[one, k] - 1.0) ** 2 + (sums[other, k] - 1.0) ** 2)
            total[k] = sums[one, k] + sums[other, k]
            part[k] = 0.0
        good = True
        for k in range(features):
            if max(abs(sums[one, k] - 1.0), abs(sums[other, k] - 1.0)) >= enough:
                good = False
        if good:
            continue
        for slot in range(counts[one]):
            items[slot] = held[one, slot]
        for slot in range(counts[other]):
            items[counts[one] + slot] = held[other, slot]
        chosen = 0
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
        if chosen == 0:
            continue
        counts[one] = counts[other] = 0
        for k in range(features):
            sums[one, k] = sums[other, k] = 0.0
        for slot in range(count):
            bin_ = one if (chosen >> slot) & 1 else other
            held[bin_, counts[bin_]] = items[slot]
            counts[bin_] += 1
            for k in range(features):
                sums[bin_, k] += loads[items[slot], k]
        for bin_ in (one, other):
            for slot in range(counts[bin_], held.shape[1]):
                held[bin_, slot] = -1
