"""Steps of balanced rows: an epoch is planned as a whole or window by window, by the lengths of its samples."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import asdict
from math import ceil
from typing import Any, Protocol
from zlib import crc32

import numpy as np

from dhp.base.errors import DataError
from dhp.data.balance.methods import METHODS
from dhp.data.balance.packs import Limits, Loads, Packs
from dhp.data.order.balance_settings import Balancing
from dhp.data.order.sampler import LENGTHS, ROWS, BatchLayout, Sampler, StepBatch, epoch_order

_KEPT_EPOCHS = 2  # epochs whose plans are kept: reading ahead goes from one to the next


class Measured(Protocol):
    """A dataset whose lengths are known, or can be."""

    def __len__(self) -> int:
        """Samples of one epoch."""

    def loads(self, indices: np.ndarray, epoch: int) -> Loads:
        """Lengths of samples of an epoch; text 0 where one is defective."""

    def defects(self, indices: np.ndarray, epoch: int) -> list[str]:
        """What is wrong with each of these samples of an epoch; they are all defective."""


class BalancedSampler(Sampler):
    """Rows by one of `dhp.data.balance.methods`; a step has `layout.rows` of them, the last of an epoch may have fewer.

    What is planned together is a window of a random order. The samples of rows that are too few for a step go on to
    the next window, so only an epoch's end is short. Samples whose lengths cannot be told are left out and named in
    the first step of their window. While a window's steps are handed out, each also looks up a share of the lengths of
    the next one, so that none has to wait for all of them.
    """

    def __init__(
        self, dataset: Measured, balancing: Balancing, layout: BatchLayout, seed: int, on_bad_sample: str = "error"
    ) -> None:
        """on_bad_sample: "error" raises DataError for the first defective sample, "skip" leaves it out."""
        super().__init__(layout, seed)
        self._dataset, self._balancing = dataset, balancing
        self._skip = on_bad_sample == "skip"
        self._limits: Limits | None = None
        # By epoch and window: of the lengths and of the rows, of all windows up to this one.
        self._digests: dict[tuple[int, int], tuple[int, int]] = {}
        self._ends: list[int] = []  # steps up to the end of each epoch that is planned to its end
        self._epochs: dict[int, _Epoch] = {}

    def batch(self, step: int) -> StepBatch:
        """As `Sampler.batch`. Plans what is not planned yet, from the beginning: later epochs need the steps of all
        before. Raises DataError for a defective sample, as on_bad_sample says."""
        epoch, place = self._locate(step)
        plan = self._epoch(epoch)
        self._dataset.loads(plan.due(place), epoch)
        width, rows = self.layout.replicas, [tuple(row.tolist()) for row in plan.rows(place)]
        rows += [()] * (self.layout.rows - len(rows))
        return StepBatch(
            step=step,
            epoch=epoch,
            done=epoch + plan.share(place),
            samples=tuple(tuple(rows[start : start + width]) for start in range(0, len(rows), width)),
            defects=plan.defects(place),
        )

    def steps(self, epochs: int) -> int:
        """As `Sampler.steps`; plans all of them."""
        while len(self._ends) < epochs:
            self._finish(len(self._ends))
        return self._ends[epochs - 1]

    def order(self, step: int = 0) -> dict[str, Any]:
        """As `Sampler.order`."""
        epoch, place = self._locate(max(step - 1, 0))
        lengths, rows = self._digests[epoch, self._epoch(epoch).window(place)]
        return {
            "balance": self._balancing.method,
            "seed": self.seed,
            "samples": len(self._dataset),
            "rows": self.layout.rows,
            "window": self._balancing.window,
            "limits": asdict(self.limits),
            LENGTHS: lengths,
            ROWS: rows,
        }

    def first(self, step: int) -> np.ndarray:
        """As `Sampler.first`: what windows hold, as far as the mean number of samples of a step tells."""
        samples, window = len(self._dataset), self._window
        last = ((step + 1) * self.layout.batch_size // window + 1) * window
        return epoch_order(samples, self.seed, 0, True)[: min(last, samples)]

    @property
    def limits(self) -> Limits:
        """What a row may hold."""
        if self._limits is None:
            self._locate(0)
        return self._limits

    def plan(self, indices: np.ndarray, epoch: int, window: int) -> tuple[Packs, tuple[str, ...]]:
        """Rows of one window of an epoch, and what is wrong with the samples that are in none."""
        loads = self._dataset.loads(indices, epoch)
        usable = loads.text > 0
        defects = tuple(self._dataset.defects(indices[~usable], epoch))
        if defects and not self._skip:
            raise DataError(defects[0])
        indices, loads = indices[usable], Loads(loads.vision[usable], loads.text[usable])
        packs = self._pack(loads, epoch, window) if len(indices) else Packs(indices, indices)
        self._record(epoch, window, loads, packs)
        return Packs(indices[packs.samples], packs.ends), defects

    def _pack(self, loads: Loads, epoch: int, window: int) -> Packs:
        if self._limits is None:
            self._limits = self._balancing.limits(loads, self.layout.micro_batch_size)
        seed = int(np.random.SeedSequence([self.seed, epoch, window]).generate_state(1)[0])
        return METHODS[self._balancing.method](loads, self._limits, self.layout.rows, seed)

    def _record(self, epoch: int, window: int, loads: Loads, packs: Packs) -> None:
        """A run that goes on must have had the same lengths and rows: else it would lose samples and repeat others."""
        before = (epoch, window - 1) if window else (epoch - 1, self._windows - 1)
        lengths, rows = self._digests.get(before, (0, 0))
        self._digests[epoch, window] = (
            _digest(loads.vision, loads.text, lengths),
            _digest(packs.samples, packs.ends, rows),
        )

    @property
    def _window(self) -> int:
        """Samples that are planned together."""
        return self._balancing.window or len(self._dataset)

    @property
    def _windows(self) -> int:
        """Of an epoch."""
        return -(-len(self._dataset) // self._window)

    def _locate(self, step: int) -> tuple[int, int]:
        """Epoch of a step, and its place there."""
        epoch = bisect_right(self._ends, step)
        before = self._ends[epoch - 1] if epoch else 0
        while not self._epoch(epoch).reaches(step - before):
            before = self._finish(epoch)
            epoch += 1
        return epoch, step - before

    def _finish(self, epoch: int) -> int:
        """Steps up to the end of an epoch."""
        if epoch == len(self._ends):
            steps = self._epoch(epoch).finish()
            if not steps:
                raise DataError("not one sample of the datasets can be used; `python -m dhp inspect data` tells why")
            self._ends.append((self._ends[-1] if self._ends else 0) + steps)
        return self._ends[epoch]

    def _epoch(self, epoch: int) -> _Epoch:
        if epoch not in self._epochs:
            order = epoch_order(len(self._dataset), self.seed, epoch, True)
            self._epochs[epoch] = _Epoch(self, epoch, order, self._window)
            for old in [number for number in self._epochs if number + _KEPT_EPOCHS <= epoch]:
                del self._epochs[old]
        return self._epochs[epoch]


def _digest(one: np.ndarray, other: np.ndarray, before: int) -> int:
    return crc32(other.astype(np.int64).tobytes(), crc32(one.astype(np.int64).tobytes(), before))


class _Epoch:
    """The rows of one epoch, as far as they are planned."""

    def __init__(self, sampler: BalancedSampler, epoch: int, order: np.ndarray, window: int) -> None:
        self._sampler, self._epoch = sampler, epoch
        self._samples = len(order)
        self._width = sampler.layout.rows
        self._windows = [order[start : start + window] for start in range(0, len(order), window)]
        self._planned: list[Packs] = []  # of each window, whole steps but for the last
        self._ends: list[int] = []  # rows up to the end of each
        self._left = order[:0]
        self._defects: dict[int, tuple[str, ...]] = {}
        self._waiting: tuple[str, ...] = ()  # of windows too small for a step of their own
        self._due = (0, 0)  # a window, and how many samples of the next one were due

    def reaches(self, place: int) -> bool:
        """Whether the epoch has a step of that number; plans as far as it takes to know that and whether it is the last
        one, which names what the windows behind it leave out."""
        while len(self._planned) < len(self._windows) and self._rows() <= (place + 1) * self._width:
            self._extend()
        return place * self._width < self._rows()

    def finish(self) -> int:
        """Plan to the end. Steps of the epoch."""
        while len(self._planned) < len(self._windows):
            self._extend()
        return -(-self._rows() // self._width)

    def rows(self, place: int) -> list[np.ndarray]:
        """Samples of each row of a step."""
        first = place * self._width
        return [self._row(row) for row in range(first, min(first + self._width, self._rows()))]

    def share(self, place: int) -> float:
        """Of the epoch's samples, how many are seen or left out after a step."""
        if (place + 1) * self._width >= self._rows() and len(self._planned) == len(self._windows):
            return 1.0
        number, row = self._find((place + 1) * self._width - 1)
        seen = sum(len(packs.samples) for packs in self._planned[:number]) + int(self._planned[number].ends[row])
        return seen / self._samples

    def window(self, place: int) -> int:
        """The window that the last row of a step is from."""
        return self._find(min((place + 1) * self._width, self._rows()) - 1)[0]

    def due(self, place: int) -> np.ndarray:
        """Samples of the next window whose lengths should be known by a step and were not due before: of all of them
        the share that the window's rows up to this step are of its rows."""
        number, row = self._find(min((place + 1) * self._width, self._rows()) - 1)
        following = self._windows[number + 1] if number + 1 < len(self._windows) else self._left[:0]
        first = self._due[1] if self._due[0] == number else 0
        last = ceil((row + 1) / len(self._planned[number]) * len(following))
        self._due = number, max(first, last)
        return following[first:last]

    def defects(self, place: int) -> tuple[str, ...]:
        """What is wrong with samples that are left out at a step."""
        return self._defects.get(place, ())

    def _extend(self) -> None:
        number = len(self._planned)
        indices = np.concatenate([self._left, self._windows[number]])
        packs, defects = self._sampler.plan(indices, self._epoch, number)
        self._waiting += defects
        last = number == len(self._windows) - 1
        kept = len(packs) if last else len(packs) // self._width * self._width
        end = int(packs.ends[kept - 1]) if kept else 0
        self._left = packs.samples[end:]
        if self._waiting and (kept or last):
            # At the end of an epoch there may be no later step to name them.
            place = self._rows() // self._width - (not kept and self._rows() > 0)
            self._defects[place] = self._defects.get(place, ()) + self._waiting
            self._waiting = ()
        self._ends.append(self._rows() + kept)
        self._planned.append(Packs(packs.samples[:end], packs.ends[:kept]))

    def _rows(self) -> int:
        return self._ends[-1] if self._ends else 0

    def _row(self, row: int) -> np.ndarray:
        number, place = self._find(row)
        return self._planned[number].pack(place)

    def _find(self, row: int) -> tuple[int, int]:
        """Window of a row, and its place there."""
        number = bisect_right(self._ends, row)
        return number, row - (self._ends[number - 1] if number else 0)
