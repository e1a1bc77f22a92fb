"""The steps of one epoch of balanced rows, planned window by window as far as they are asked for."""

from __future__ import annotations

from bisect import bisect_right
from math import ceil

import numpy as np

from dhp.data.balance.packs import Packs
from dhp.data.order.window_planner import WindowPlanner


class EpochPlan:
    """The rows of one epoch, as far as they are planned. Steps are counted from the beginning of the epoch."""

    def __init__(self, planner: WindowPlanner, epoch: int, order: np.ndarray, width: int) -> None:
        """order: the samples of the epoch. width: rows a step."""
        self._planner, self._epoch = planner, epoch
        self._samples, self._width = len(order), width
        self._windows = [order[start : start + planner.window] for start in range(0, len(order), planner.window)]
        self._planned: list[Packs] = []  # of each window, whole steps but for the last
        self._ends: list[int] = []  # rows up to the end of each
        self._left = order[:0]
        self._defects: dict[int, tuple[str, ...]] = {}
        self._waiting: tuple[str, ...] = ()  # of windows too small for a step of their own

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
        seen = sum(len(packs.samples) for packs in self._planned[:number]) + int(self._planned[number].ends[row])
        return seen / self._samples

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

    def _extend(self) -> None:
        number = len(self._planned)
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
