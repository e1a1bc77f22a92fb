"""Which samples a step trains on, and where each goes: pure functions of seed, epoch and layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil

import numpy as np


@dataclass(frozen=True)
class BatchLayout:
    """How a global batch divides over text data replicas and micro-batches."""

    replicas: int
    micro_batches: int
    micro_batch_size: int  # samples per micro-batch and replica

    @property
    def batch_size(self) -> int:
        """Samples a step, over all replicas and micro-batches."""
        return self.replicas * self.micro_batches * self.micro_batch_size


@lru_cache(maxsize=2)  # for millions of samples an order takes longer than a step's reading
def epoch_order(n: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray:
    """The order of n samples in one epoch: int64 [n], a permutation of 0..n-1, in file order unless shuffled.

    Read-only, because it is shared.
    """
    order = np.random.default_rng([seed, epoch]).permutation(n) if shuffle else np.arange(n)
    order.flags.writeable = False
    return order


def steps_per_epoch(n: int, layout: BatchLayout) -> int:
    """Steps that show each of n samples once; the last may be short, nothing is dropped."""
    return ceil(n / layout.batch_size)


def epoch_of(step: int, n: int, layout: BatchLayout) -> int:
    """The epoch (0-based) that a step (0-based) belongs to."""
    return step // steps_per_epoch(n, layout)


def step_indices(step: int, n: int, layout: BatchLayout, seed: int, shuffle: bool) -> tuple[int, ...]:
    """The dataset indices of one step (0-based), in order; fewer than batch_size at the end of an epoch."""
    epoch, step_in_epoch = divmod(step, steps_per_epoch(n, layout))
    start = step_in_epoch * layout.batch_size
    order = epoch_order(n, seed, epoch, shuffle)
    return tuple(int(index) for index in order[start : start + layout.batch_size])


def slots(indices: Sequence[int], layout: BatchLayout) -> list[list[tuple[int, ...]]]:
    """Deal a global batch out: [micro_batch][replica] -> its indices.

    Micro-batches are filled one after another, and within one its replicas. In a short batch the later
    slots are therefore smaller or empty.
    """
    size = layout.micro_batch_size
    starts = [
        [(micro * layout.replicas + replica) * size for replica in range(layout.replicas)]
        for micro in range(layout.micro_batches)
    ]
    return [[tuple(indices[start : start + size]) for start in row] for row in starts]
