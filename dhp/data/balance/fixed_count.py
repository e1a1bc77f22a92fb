"""Methods that put a fixed number of samples into a batch, as most trainers do: random, by length, by device."""

from __future__ import annotations

import numpy as np

from dhp.data.balance.packs import Limits, Loads, Packs


def random_batches(loads: Loads, limits: Limits, replicas: int, seed: int) -> Packs:
    """Samples in random order, `limits.samples` a pack."""
    return _cut(np.random.default_rng(seed).permutation(len(loads)), limits.samples)


def length_group(loads: Loads, limits: Limits, replicas: int, seed: int) -> Packs:
    """Samples of like lengths in a pack: sorted inside windows of a random order, packs in random order again."""
    rng = np.random.default_rng(seed)
    order = _sorted_windows(loads, rng.permutation(len(loads)), limits.samples * replicas * limits.window)
    packs = _cut(order, limits.samples)
    return packs.reordered(rng.permutation(len(packs)))


def device_group(loads: Loads, limits: Limits, replicas: int, seed: int) -> Packs:
    """Samples of like lengths on the devices of a step: each takes one of `replicas` neighbours, several times."""
    rng = np.random.default_rng(seed)
    step = limits.samples * replicas
    order = _sorted_windows(loads, rng.permutation(len(loads)), step * limits.window)
    whole = len(order) // step * step
    neighbours = order[:whole].reshape(-1, replicas)
    grouped = rng.permutation(neighbours).reshape(-1, limits.samples, replicas).transpose(0, 2, 1)
    return _cut(np.concatenate([grouped.reshape(-1), order[whole:]]), limits.samples)


def _sorted_windows(loads: Loads, order: np.ndarray, size: int) -> np.ndarray:
    windows = np.arange(len(order)) // size
    return order[np.lexsort((loads.text[order], loads.vision[order], windows))]


def _cut(order: np.ndarray, size: int) -> Packs:
    ends = np.arange(size, len(order) + size, size).clip(max=len(order))
    return Packs(order.astype(np.int64), ends.astype(np.int64))
