"""The part of a dataset that an epoch has: a constant share of its samples, and a fractional weight."""

from __future__ import annotations

from functools import lru_cache
from zlib import crc32

import numpy as np

from dhp.data.annotations import Annotations
from dhp.data.records import Record


class Portion:
    """A dataset as epochs show it: `record(i, e)` depends on the arguments and the constructor's alone."""

    def __init__(self, annotations: Annotations, share: float, weight: float, seed: int, shuffle: bool) -> None:
        """share: of the samples, 0 < share <= 1, drawn once. weight: how often an epoch shows each of them on average.

        shuffle: which samples come once more, where the weight is not whole, is drawn anew for each cycle through them;
        otherwise they take turns.
        """
        self.annotations = annotations
        self._seeds = [seed, crc32(annotations.dataset.encode())]
        self._kept = self._draw(share) if share < 1 else None  # int64 [samples], ascending; None: all
        self._samples = len(annotations) if self._kept is None else len(self._kept)
        self._shown = max(1, round(weight * self._samples))
        self._shuffle = shuffle and self._shown != self._samples  # an epoch is shuffled as a whole anyway
        self._order = lru_cache(maxsize=2)(self._cycle_order)

    def __len__(self) -> int:
        """Samples of one epoch."""
        return self._shown

    def record(self, index: int, epoch: int) -> Record:
        """Parse one annotation. index: within the epoch; both 0-based. DataError, with its place, if it is bad."""
        return self.annotations.record(int(self.rows(np.array([index]), epoch)[0]))

    def rows(self, indices: np.ndarray, epoch: int) -> np.ndarray:
        """Rows of the annotations (0-based) that an epoch shows at these indices: int64."""
        # Epochs go round through all samples again and again, so each is shown as often as any other, give or take one.
        cycles, rows = np.divmod(epoch * self._shown + indices, self._samples)
        if self._shuffle:
            for cycle in np.unique(cycles):
                of_cycle = cycles == cycle
                rows[of_cycle] = self._order(int(cycle))[rows[of_cycle]]
        return rows if self._kept is None else self._kept[rows]

    def _draw(self, share: float) -> np.ndarray:
        total = len(self.annotations)
        drawn = np.random.default_rng(self._seeds).permutation(total)[: max(1, round(share * total))]
        return np.sort(drawn)

    def _cycle_order(self, cycle: int) -> np.ndarray:
        return np.random.default_rng([*self._seeds, cycle + 1]).permutation(self._samples)
