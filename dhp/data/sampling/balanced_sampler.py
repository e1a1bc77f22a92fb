"""Steps of balanced rows: an epoch is planned as a whole or window by window, by the lengths of its samples."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from dhp.core.errors import DataError
from dhp.data.balance.packs import Limits
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
from dhp.data.sampling.window_plan import EpochPlan, WindowPlanner, WindowState

if TYPE_CHECKING:
    from dhp.data.sampling.length_table import MeasuredDataset


WINDOW = "window"  # of a state: where the window that it stopped in begins
_KEPT_EPOCHS = 2  # epochs whose plans are kept: reading ahead goes from one to the next


class BalancedSampler(Sampler):
    """Rows by one of `dhp.data.balance.methods`; a step has `layout.rows` of them, the last of an epoch may have fewer.

    An epoch's samples come in random order; a window of them is planned at a time. Rows that are too few for a step
    give their samples to the next window, so only the last step of an epoch is short. Samples whose lengths cannot be
    measured are left out and named in the first step of their window. Each step also looks up some lengths of the next
    window, so that no step waits for all of them.
    """

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
        width, rows = self.layout.replicas, [tuple(row.tolist()) for row in plan.rows(inside)]
        rows += [()] * (self.layout.places - len(rows))
        return StepBatch(
            step=step,
            epoch=epoch,
            done=epoch + plan.share(inside),
            samples=tuple(tuple(rows[start : start + width]) for start in range(0, len(rows), width)),
            defects=plan.defects(inside),
        )

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
        """Epoch of a step, and its number there."""
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
