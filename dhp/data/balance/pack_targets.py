"""The number of packs, the target of each, and the order of packs in steps."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import numpy as np

from dhp.data.balance.packs import Limits, Packs

SMALL_UNITS = 64  # vision units a pack; with fewer, no pack can meet a target that is not whole


def least_bins(vision: float, text: float, limits: Limits) -> int:
    """How many packs hold these totals within the limits. Where a pack has few units of vision, their mean number is
    brought down to a whole one."""
    bins = max(1, ceil(vision / limits.vision), ceil(text / limits.text))
    target = vision / bins + 1e-3  # one bin more than needed must not cost a whole unit
    return ceil(vision / int(target)) if 1.0 <= target < SMALL_UNITS else bins


def whole_shares(total: int, bins: int) -> np.ndarray:
    """`total` in whole shares that differ by one at most, the larger ones spread evenly: int64 [bins]."""
    return np.diff(np.arange(bins + 1) * total // max(bins, 1))


def others_than(chosen: np.ndarray, count: int) -> np.ndarray:
    """Which of `count` items are not among the chosen ones, ascending."""
    free = np.ones(count, dtype=np.bool_)
    free[chosen] = False
    return np.flatnonzero(free)


def costly(squares: np.ndarray, quantiles: Sequence[float]) -> np.ndarray:
    """Class of each pack by Σ tokens², which is what attention costs: int64 [packs], 0 for most packs.

    Classes are few and small: packs of one class hold samples that are alike, and steps of like samples bias the order
    of training.
    """
    return np.searchsorted(np.quantile(squares, quantiles), squares)


def single(samples: np.ndarray) -> Packs:
    """Each sample in a pack of its own."""
    return Packs(samples, np.arange(1, len(samples) + 1))


def divisible(packs: Packs, replicas: int) -> Packs:
    """Some packs halved, those of most samples, so that `replicas` divides their number; if there are enough."""
    missing = -len(packs) % replicas
    if not missing:
        return packs
    chosen = np.argsort(-packs.counts, kind="stable")[:missing]
    middles = (packs.starts[chosen] + packs.counts[chosen] // 2)[packs.counts[chosen] > 1]
    return Packs(packs.samples, np.sort(np.concatenate([packs.ends, middles])))


def shuffled_steps(order: np.ndarray, packs: Packs, replicas: int, rng: np.random.Generator) -> Packs:
    """Each `replicas` neighbours of the order a step; steps at random, a short one last."""
    whole = len(order) // replicas * replicas
    steps = rng.permutation(order[:whole].reshape(-1, replicas)).reshape(-1)
    return packs.reordered(np.concatenate([steps, order[whole:]]))
