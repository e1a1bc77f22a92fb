"""Samples balanced rows: an epoch whole or by windows."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import ceil
from typing import TYPE_CHECKING, Any
from zlib import crc32

import numpy as np

from dhp.core.errors import DataError
from dhp.data.balance.methods import choose_method
from dhp.data.balance.micro_batches import EVENED, micro_batch_order
from dhp.data.balance.packs import Limits, Loads, Packs
from dhp.data.sampling.sampler import (
    FULLEST_FIRST,
    LENGTHS,
    ROWS,
    BalanceSettings,
    BatchLayout,
    Sampler,
    StepBatch,
    epoch_order,
)

if TYPE_CHECKING:
    from dhp.data.sampling.length_table import MeasuredDataset


def fullest_first(packs: Packs, loads: Loads, width: int) -> Packs:
    """The same packs with up to two steps moved to the front: the one that has the pack with most text, of equal ones
    that with most vision; and the one with most vision over all its packs, unless that is the first one.

    Packs of a step stay together, so a step is as even as before; all other steps stay in their order. Packs behind the
    last whole step stay where they are. width: packs of a step, 1 or more."""
    steps = len(packs) // width
    if steps < 2:
        return packs
    whole = steps * width
    text, vision = packs.sums(loads.text)[:whole], packs.sums(loads.vision)[:whole]
    longest = np.flatnonzero(text == text.max())
    leading = [int(longest[vision[longest].argmax()]) // width]
    of_steps = vision.reshape(steps, width).sum(axis=1)
    if of_steps[leading[0]] < of_steps.max():
        leading.append(int(of_steps.argmax()))
    order = np.concatenate([leading, np.delete(np.arange(steps), leading)])
    moved = (order[:, None] * width + np.arange(width)).ravel()
    return packs.reordered(np.concatenate([moved, np.arange(whole, len(packs))]))


@dataclass(frozen=True)
class WindowState:
    """What was planned before a window, as far as planning it and later ones needs it.

    rows: of the epoch's windows before it. seen: samples in these. left: samples that they leave to it. waiting:
    defects of samples that no step has named yet. lengths, planned: checksums of all windows before it."""

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

        Their share of the next window is the share of this window's rows that are trained on by then."""
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
        number = bisect_right(self._ends, row)
        return number, row - (self._ends[number - 1] if number else 0)


WINDOW = "window"  # of a state: where the window that it stopped in begins
_KEPT_EPOCHS = 2  # epochs whose plans are kept: reading ahead goes from one to the next


class BalancedSampler(Sampler):
    """Rows by one of `dhp.data.balance.methods`; a step has `layout.rows` of them, the last of an epoch may have fewer.

    An epoch's samples come in random order; a window of them is planned at a time. Rows that are too few for a step
    give their samples to the next window, so only the last step of an epoch is short. Samples whose lengths cannot be
    measured are left out and named in the first step of their window. Each step also looks up some lengths of the next
    window, so that no step waits for all of them."""

    def __init__(
        self,
        dataset: MeasuredDataset,
        balancing: BalanceSettings,
        layout: BatchLayout,
        seed: int,
        on_bad_sample: str = "error",
    ) -> None:
        """on_bad_sample: "error" raises DataError for the first defective sample, "skip" leaves it out."""
        super().__init__(layout, seed)
        self._dataset, self._balancing = dataset, balancing
        self._planner = WindowPlanner(dataset, balancing, layout, seed, on_bad_sample == "skip")
        self._ends: list[int] = []  # steps up to the end of each epoch that is planned to its end
        self._epochs: dict[int, EpochPlan] = {}
        self._begun: WindowState | None = None  # where a run that is continued plans from

    def batch(self, step: int) -> StepBatch:
        """As `Sampler.batch`. Plans what is not planned yet, from the beginning: later epochs need the steps of all
        before. Raises DataError for a defective sample, as on_bad_sample says."""
        epoch, inside = self._locate(step)
        plan = self._epoch(epoch)
        self._planner.measure(plan.due(inside), epoch)
        width, rows = self.layout.replicas, [tuple(row.tolist()) for row in self._evened(plan.rows(inside), epoch)]
        rows += [()] * (self.layout.places - len(rows))
        return StepBatch(
            step=step,
            epoch=epoch,
            done=epoch + plan.share(inside),
            samples=tuple(tuple(rows[start : start + width]) for start in range(0, len(rows), width)),
            defects=plan.defects(inside),
        )

    def _evened(self, rows: list[np.ndarray], epoch: int) -> list[np.ndarray]:
        """A step's rows in the order of its micro-batches. The plan does not know these: another number of replicas
        goes on in it."""
        if self._balancing.method not in EVENED or len(rows) <= self.layout.replicas:
            return rows
        loads, starts = self._dataset.loads(np.concatenate(rows), epoch), np.cumsum([0, *map(len, rows[:-1])])
        vision, text = (np.add.reduceat(values, starts) for values in (loads.vision, loads.text))
        return [rows[at] for at in micro_batch_order(vision, text, self.layout.replicas)]

    def steps(self, epochs: int) -> int:
        """As `Sampler.steps`; plans all of them."""
        while len(self._ends) < epochs:
            self._finish(len(self._ends))
        return self._ends[epochs - 1]

    def order(self, step: int = 0) -> dict[str, Any]:
        epoch, inside = self._locate(max(step - 1, 0))
        lengths, rows = self._planner.digests(epoch, self._epoch(epoch).window(inside))
        return {
            "balance": self._balancing.method,
            "seed": self.seed,
            "samples": len(self._dataset),
            "rows": self.layout.rows,
            "window": self._balancing.window,
            **({} if self._balancing.long is None else {"long": self._balancing.long}),
            FULLEST_FIRST: self._balancing.fullest_first,
            "limits": asdict(self.limits),
            LENGTHS: lengths,
            ROWS: rows,
        }

    def state(self, step: int) -> dict[str, Any]:
        """As `Sampler.state`, with where the window that the last of these steps ends in begins."""
        state = super().state(step)
        if not step:
            return state
        epoch, inside = self._locate(step - 1)
        begun = asdict(self._epoch(epoch).state(inside))
        return state | {WINDOW: begun | {"ends": self._ends[:epoch]}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `Sampler.load_state_dict`. Windows before the one that the other sampler stopped in are not planned again:
        what they left over is in the state."""
        if WINDOW in state and not self._epochs and state["order"].get("samples") == len(self._dataset):
            kept = dict(state[WINDOW])
            ends = kept.pop("ends")
            begun = WindowState(**kept | {"left": tuple(kept["left"]), "waiting": tuple(kept["waiting"])})
            if begun.window * self._planner.window < len(self._dataset):
                self._planner.begin(begun)
                self._ends, self._begun = list(ends), begun
        super().load_state_dict(state)

    def first(self, step: int) -> np.ndarray:
        """As `Sampler.first`: the windows up to the step's, which the mean number of samples a step tells."""
        samples, window = len(self._dataset), self._planner.window
        last = ((step + 1) * self.layout.batch_size // window + 1) * window
        return epoch_order(samples, self.seed, 0, True)[: min(last, samples)]

    @property
    def limits(self) -> Limits:
        """Limits of a row."""
        if self._planner.limits is None:
            self._locate(0)
        assert self._planner.limits is not None  # planning the first window has set them
        return self._planner.limits

    def _locate(self, step: int) -> tuple[int, int]:
        epoch = bisect_right(self._ends, step)
        before = self._ends[epoch - 1] if epoch else 0
        while not self._epoch(epoch).reaches(step - before):
            before = self._finish(epoch)
            epoch += 1
        return epoch, step - before

    def _finish(self, epoch: int) -> int:
        if epoch == len(self._ends):
            steps = self._epoch(epoch).finish()
            if not steps:
                raise DataError("not one sample of the datasets can be used; `python -m dhp inspect data` tells why")
            self._ends.append((self._ends[-1] if self._ends else 0) + steps)
        return self._ends[epoch]

    def _epoch(self, epoch: int) -> EpochPlan:
        if epoch not in self._epochs:
            order = epoch_order(len(self._dataset), self.seed, epoch, True)
            begun = self._begun if self._begun is not None and self._begun.epoch == epoch else None
            self._epochs[epoch] = EpochPlan(self._planner, epoch, order, self.layout.rows, begun)
            for old in [number for number in self._epochs if number + _KEPT_EPOCHS <= epoch]:
                del self._epochs[old]
        return self._epochs[epoch]
