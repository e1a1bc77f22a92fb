"""Balancing methods by name, all of one signature: loads, limits, replicas, seed → packs.

Each pass shuffles the samples that are left, fills packs in that order until a limit would be passed, keeps the packs
that are full enough and gives the samples of the others back. The last pass keeps all its packs, as in the published
code. Unlike that code, this one keeps samples that are beyond a limit, each in a pack of its own.

A step's layout can then suit all of its rows: few long ones over all ranks of a sequence, or many short ones over fewer
(OmniBal, Yao et al. 2025, its long-context setting). Nothing is dropped. Rows of either kind that are too few for a
step come last, together.
"""

from __future__ import annotations

from functools import partial

import numpy as np
from numba import njit

from dhp.core.plugins import takes
from dhp.data.balance.packs import Limits, Loads, Method, Packs, divisible, from_groups, join, shuffled_steps
from dhp.data.balance.per_modality import per_modality


def random_batches(loads: Loads, limits: Limits, replicas: int, seed: int) -> Packs:
    """Samples in random order, `limits.samples` a pack."""
    return cut(np.random.default_rng(seed).permutation(len(loads)), limits.samples)


def cut(order: np.ndarray, size: int) -> Packs:
    """Packs of `size` neighbours in this order each, the last of what is left."""
    ends = np.arange(size, len(order) + size, size).clip(max=len(order))
    return Packs(order.astype(np.int64), ends.astype(np.int64))


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


def keep_apart(method: Method, long: int, loads: Loads, limits: Limits, rows: int, seed: int) -> Packs:
    """Packs of `method`, `rows` of them a step, none with samples of `long` tokens or more together with shorter ones.
    Steps come in random order."""
    is_long = loads.text >= long
    parts = [_of_kind(method, loads, limits, rows, seed, np.flatnonzero(kind)) for kind in (is_long, ~is_long)]
    whole = [len(part) // rows * rows for part in parts]
    packs = join(parts)
    numbers = np.split(np.arange(len(packs)), [whole[0], len(parts[0]), len(parts[0]) + whole[1]])
    order = np.concatenate([numbers[0], numbers[2], numbers[1], numbers[3]])
    return shuffled_steps(order, packs, rows, np.random.default_rng(seed))


def _of_kind(method: Method, loads: Loads, limits: Limits, rows: int, seed: int, samples: np.ndarray) -> Packs:
    if not len(samples):
        return Packs(samples, samples)
    packs = divisible(method(Loads(loads.vision[samples], loads.text[samples]), limits, rows, seed), rows)
    return Packs(samples[packs.samples], packs.ends)


BALANCE_METHODS: dict[str, Method] = {"random": random_batches, "isf": isf, "balanced": per_modality}
takes("data.balance", BALANCE_METHODS)


def choose_method(name: str, long: int | None) -> Method:
    """The method of that name. long: tokens from which on samples are kept apart from shorter ones; None: none are."""
    method = BALANCE_METHODS[name]
    return method if long is None else partial(keep_apart, method, long)
