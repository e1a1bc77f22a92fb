"""Long samples and short ones in steps of their own, each kind balanced by itself.

A step's layout can then suit all of its rows: few long ones over all ranks of a sequence, or many short ones over fewer
(OmniBal, Yao et al. 2025, its long-context setting). Nothing is dropped. Rows of either kind that are too few for a
step come last, together.
"""

from __future__ import annotations

import numpy as np

from dhp.data.balance.pack_targets import divisible, shuffled_steps
from dhp.data.balance.packs import Limits, Loads, Method, Packs, join


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
