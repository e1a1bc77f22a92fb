"""Iterative sampling and filtering (OmniBal, Yao et al. 2025, section 4.1): constant amounts of images and text.

Each pass shuffles the samples that are left, fills packs in that order until a limit would be passed, keeps the packs
that are full enough and gives the samples of the others back. The last pass keeps all its packs, as in the published
code. Unlike that code, this one keeps samples that are beyond a limit, each in a pack of its own.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from dhp.data.balance.packs import Limits, Loads, Packs, from_groups


def isf(loads: Loads, limits: Limits, replicas: int, seed: int) -> Packs:
    """Packs in random order, which hold all samples. replicas: unused, for the method knows no steps."""
    rng = np.random.default_rng(seed)
    group = np.full(len(loads), -1, dtype=np.int64)
    made = 0
    left = np.arange(len(loads))
    for turn in range(limits.passes):
        left = rng.permutation(left)
        numbers, full = _fill(loads.vision[left], loads.text[left], limits.vision, limits.text, *limits.full)
        keep = full[numbers] if turn < limits.passes - 1 else np.ones(len(left), dtype=np.bool_)
        group[left[keep]] = made + numbers[keep]
        made += len(full)
        left = left[~keep]
        if not len(left):
            break
    packs = from_groups(group)
    return packs.reordered(rng.permutation(len(packs)))


@njit(cache=True)
def _fill(
    vision: np.ndarray, text: np.ndarray, most_vision: int, most_text: int, full_vision: int, full_text: int
) -> tuple[np.ndarray, np.ndarray]:  # pragma: no cover - compiled
    """Number of each sample's pack, and of each pack whether it passes the filter."""
    numbers = np.empty(len(text), np.int64)
    full = np.zeros(len(text), np.bool_)
    pack, v, t = 0, 0, 0
    for i in range(len(text)):
        if (v or t) and (v + vision[i] > most_vision or t + text[i] > most_text):
            full[pack] = v >= full_vision or t >= full_text
            pack, v, t = pack + 1, 0, 0
        numbers[i] = pack
        v += vision[i]
        t += text[i]
    if len(text):
        full[pack] = v >= full_vision or t >= full_text
        pack += 1
    return numbers, full[:pack]
