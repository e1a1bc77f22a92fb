"""Windows of an epoch: the rows that are planned of each by the lengths of its samples, one window after another."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING
from zlib import crc32

import numpy as np

from dhp.core.errors import DataError
from dhp.data.balance.methods import choose_method
from dhp.data.balance.packs import Limits, Loads, Packs
from dhp.data.sampling.fullest_first import fullest_first
from dhp.data.sampling.sampler import BalanceSettings, BatchLayout, epoch_order

if TYPE_CHECKING:
    from dhp.data.sampling.length_table import MeasuredDataset


@dataclass(frozen=True)
class WindowState:
    """What was planned before a window, as far as planning it and later ones needs it.

    rows: of the epoch's windows before it. seen: samples in these. left: samples that they leave to it. waiting:
    defects of samples that no step has named yet. lengths, planned: checksums of all windows before it.
    """

    epoch: int
    window: int
    rows: int
    seen: int
    left: tuple[int, ...]
    waiting: tuple[str, ...]
    lengths: int
    planned: int


class WindowPlanner:
    """Plans windows, from the first window of the first epoch on: its lengths decide what all rows hold where the
    settings leave that open, and digests go on from window to window."""

    def __init__(
        self, dataset: MeasuredDataset, balancing: BalanceSettings, layout: BatchLayout, seed: int, skip: bool
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
        packs = method(loads, self.limits, self._layout.rows, seed)
        if self._balancing.fullest_first and (epoch, window) == (0, 0):
            return fullest_first(packs, loads, self._layout.rows)
        return packs

    def _record(self, epoch: int, window: int, loads: Loads, packs: Packs) -> None:
        """A run that goes on must have had the same lengths and rows: else it would lose samples and repeat others."""
        lengths, rows = self.before(epoch, window)
        self._digests[epoch, window] = (
            _digest(loads.vision, loads.text, lengths),
            _digest(packs.samples, packs.ends, rows),
        )

    def before(self, epoch: int, window: int) -> tuple[int, int]:
        """The checksums of all windows before this one."""
        windows = -(-len(self._dataset) // self.window)  # of an epoch
        if (epoch, window) == (0, 0):
            return (0, 0)
        return self._digests[(epoch, window - 1) if window else (epoch - 1, windows - 1)]

    def begin(self, state: WindowState) -> None:
        """Plan from a window on, as if all before it had been. Measures the lengths of the first one that has samples
        that can be used, of which limits may be made."""
        order = epoch_order(len(self._dataset), self._seed, 0, True)
        for start in range(0, len(order), self.window):
            loads = self._dataset.loads(order[start : start + self.window], 0)
            usable = loads.text > 0
            if usable.any():
                loads = Loads(loads.vision[usable], loads.text[usable])
                self.limits = self._balancing.limits(loads, self._layout.micro_batch_size)
                break
        windows = -(-len(self._dataset) // self.window)
        number = state.epoch * windows + state.window - 1
        if number >= 0:
            self._digests[divmod(number, windows)] = (state.lengths, state.planned)


def _digest(one: np.ndarray, other: np.ndarray, before: int) -> int:
    return crc32(other.astype(np.int64).tobytes(), crc32(one.astype(np.int64).tobytes(), before))


class EpochPlan:
    """The rows of one epoch, as far as they are planned. Steps are counted from the beginning of the epoch."""

    def __init__(
        self, planner: WindowPlanner, epoch: int, order: np.ndarray, width: int, begun: WindowState | None = None
    ) -> None:
        """order: the samples of the epoch. width: rows a step. begun: where to plan from; None: the first window."""
        self._planner, self._epoch = planner, epoch
        self._samples, self._width = len(order), width
        self._windows = [order[start : start + planner.window] for start in range(0, len(order), planner.window)]
        none = Packs(order[:0], order[:0])
        # Of each window: whole steps but for the last; of those before `begun` nothing.
        self._planned: list[Packs] = [none] * (begun.window if begun else 0)
        self._ends: list[int] = [begun.rows if begun else 0] * len(self._planned)  # rows up to the end of each
        self._seen = begun.seen if begun else 0  # samples of rows before `begun`
        self._left = np.array(begun.left, order.dtype) if begun else order[:0]
        self._defects: dict[int, tuple[str, ...]] = {}
        self._waiting: tuple[str, ...] = begun.waiting if begun else ()  # of windows too small for a step of their own
        self._carried: dict[int, tuple[np.ndarray, tuple[str, ...]]] = {}  # left and waiting before each window

    def reaches(self, step: int) -> bool:
        """Whether the epoch has a step of that number. Plans until that is known, and whether the step is the last: the
        last step names the samples that later windows leave out."""
        while len(self._planned) < len(self._windows) and self._rows() <= (step + 1) * self._width:
            self._extend()
        return step * self._width < self._rows()

    def finish(self) -> int:
        """Plan to the end. Steps of the epoch."""
        while len(self._planned) < len(self._windows):
            self._extend()
        return -(-self._rows() // self._width)

    def rows(self, step: int) -> list[np.ndarray]:
        """Samples of each row of a step."""
        first = step * self._width
        return [self._row(row) for row in range(first, min(first + self._width, self._rows()))]

    def share(self, step: int) -> float:
        """The share of the epoch's samples that are seen or left out once a step is done."""
        if (step + 1) * self._width >= self._rows() and len(self._planned) == len(self._windows):
            return 1.0
        number, row = self._find((step + 1) * self._width - 1)
        return (self._seen_before(number) + int(self._planned[number].ends[row])) / self._samples

    def state(self, step: int) -> WindowState:
        """What the window that a step ends in began with."""
        number = self.window(step)
        left, waiting = self._carried[number]
        rows = self._ends[number - 1] if number else 0
        digests = self._planner.before(self._epoch, number)
        carried = tuple(map(int, left)), waiting
        return WindowState(self._epoch, number, rows, self._seen_before(number), *carried, *digests)

    def window(self, step: int) -> int:
        """The window that the last row of a step is from."""
        return self._find(min((step + 1) * self._width, self._rows()) - 1)[0]

    def due(self, step: int) -> np.ndarray:
        """Samples of the next window whose lengths should be known at a step.

        Their share of the next window is the share of this window's rows that are trained on by then.
        """
        number, row = self._find(min((step + 1) * self._width, self._rows()) - 1)
        following = self._windows[number + 1] if number + 1 < len(self._windows) else self._left[:0]
        return following[: ceil((row + 1) / len(self._planned[number]) * len(following))]

    def defects(self, step: int) -> tuple[str, ...]:
        """Defects of the samples that are left out at a step."""
        return self._defects.get(step, ())

    def _seen_before(self, number: int) -> int:
        return self._seen + sum(len(packs.samples) for packs in self._planned[:number])

    def _extend(self) -> None:
        number = len(self._planned)
        self._carried[number] = (self._left, self._waiting)
        indices = np.concatenate([self._left, self._windows[number]])
        packs, defects = self._planner.plan(indices, self._epoch, number)
        self._waiting += defects
        last = number == len(self._windows) - 1
        kept = len(packs) if last else len(packs) // self._width * self._width
        end = int(packs.ends[kept - 1]) if kept else 0
        self._left = packs.samples[end:]
        if self._waiting and (kept or last):
            # At the end of an epoch there may be no later step to name them.
            step = self._rows() // self._width - (not kept and self._rows() > 0)
            self._defects[step] = self._defects.get(step, ()) + self._waiting
            self._waiting = ()
        self._ends.append(self._rows() + kept)
        self._planned.append(Packs(packs.samples[:end], packs.ends[:kept]))

    def _rows(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _row(self, row: int) -> np.ndarray:
        number, inside = self._find(row)
        return self._planned[number].pack(inside)

    def _find(self, row: int) -> tuple[int, int]:
        """Window of a row, and its number there."""
        number = bisect_right(self._ends, row)
        return number, row - (self._ends[number - 1] if number else 0)
