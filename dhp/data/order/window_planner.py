"""Plans a window of samples: rows by one of the methods, and a digest of all that decided them."""

from __future__ import annotations

from typing import Protocol
from zlib import crc32

import numpy as np

from dhp.base.errors import DataError
from dhp.data.balance.methods import choose_method
from dhp.data.balance.packs import Limits, Loads, Packs
from dhp.data.order.balance_settings import BalanceSettings
from dhp.data.order.sampler import BatchLayout


class Measured(Protocol):
    """A dataset whose lengths are known, or can be."""

    def __len__(self) -> int:
        """Samples of one epoch."""

    def loads(self, indices: np.ndarray, epoch: int) -> Loads:
        """Lengths of samples of an epoch; text 0 where one is defective."""

    def defects(self, indices: np.ndarray, epoch: int) -> list[str]:
        """The defect of each of these samples of an epoch; all of them are defective."""


class WindowPlanner:
    """Plans windows, from the first window of the first epoch on: its lengths decide what all rows hold where the
    settings leave that open, and digests go on from window to window."""

    def __init__(
        self, dataset: Measured, balancing: BalanceSettings, layout: BatchLayout, seed: int, skip: bool
    ) -> None:
        """skip: leave defective samples out; else the first one raises DataError."""
        self._dataset, self._balancing, self._layout = dataset, balancing, layout
        self._seed, self._skip = seed, skip
        self.limits: Limits | None = None  # limits of a row; None before the first window is planned
        # By epoch and window: of the lengths and of the rows, of all windows up to this one.
        self._digests: dict[tuple[int, int], tuple[int, int]] = {}

    @property
    def window(self) -> int:
        """Samples that are planned together."""
        return self._balancing.window or len(self._dataset)

    def plan(self, indices: np.ndarray, epoch: int, window: int) -> tuple[Packs, tuple[str, ...]]:
        """Rows of one window of an epoch, and the defects of samples that are in none."""
        loads = self._dataset.loads(indices, epoch)
        usable = loads.text > 0
        defects = tuple(self._dataset.defects(indices[~usable], epoch))
        if defects and not self._skip:
            raise DataError(defects[0])
        indices, loads = indices[usable], Loads(loads.vision[usable], loads.text[usable])
        packs = self._pack(loads, epoch, window) if len(indices) else Packs(indices, indices)
        self._record(epoch, window, loads, packs)
        return Packs(indices[packs.samples], packs.ends), defects

    def digests(self, epoch: int, window: int) -> tuple[int, int]:
        """Checksums of the lengths and of the rows of all windows up to this one, which is planned."""
        return self._digests[epoch, window]

    def measure(self, indices: np.ndarray, epoch: int) -> None:
        """Make sure that the lengths of these samples are known."""
        self._dataset.loads(indices, epoch)

    def _pack(self, loads: Loads, epoch: int, window: int) -> Packs:
        if self.limits is None:
            self.limits = self._balancing.limits(loads, self._layout.micro_batch_size)
        seed = int(np.random.SeedSequence([self._seed, epoch, window]).generate_state(1)[0])
        method = choose_method(self._balancing.method, self._balancing.long)
        return method(loads, self.limits, self._layout.rows, seed)

    def _record(self, epoch: int, window: int, loads: Loads, packs: Packs) -> None:
        """A run that goes on must have had the same lengths and rows: else it would lose samples and repeat others."""
        lengths, rows = self._before(epoch, window)
        self._digests[epoch, window] = (
            _digest(loads.vision, loads.text, lengths),
            _digest(packs.samples, packs.ends, rows),
        )

    def _before(self, epoch: int, window: int) -> tuple[int, int]:
        if window:
            return self._digests[epoch, window - 1]
        windows = -(-len(self._dataset) // self.window)  # of an epoch
        return self._digests[epoch - 1, windows - 1] if epoch else (0, 0)


def _digest(one: np.ndarray, other: np.ndarray, before: int) -> int:
    return crc32(other.astype(np.int64).tobytes(), crc32(one.astype(np.int64).tobytes(), before))
