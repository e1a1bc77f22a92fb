"""Whether reading keeps up with training, and what would help where it does not."""

from __future__ import annotations

from collections import deque
from math import ceil

WINDOW = 20  # steps that are looked at together
TOLERATED = 0.02  # of the step time may be spent waiting for data
ROOM = 1.1  # steps differ: so much more than the mean needs


class KeepingUp:
    """One run's waits for data. workers, prefetch: data.num_workers, and the steps that are read ahead."""

    def __init__(self, workers: int, prefetch: int) -> None:
        self._workers, self._prefetch = workers, prefetch
        self._steps: deque[tuple[float, float, float]] = deque(maxlen=WINDOW)
        self._seen = 0
        self._next = WINDOW + 1  # the first step waits for its data however fast reading is

    def add(self, step_s: float, data_s: float, read_s: float) -> str | None:
        """A step has ended: its seconds, those of them waiting for data, and those one process spent reading it. What
        to tell the user, now and then, while more than 2% of the time goes into waiting."""
        self._seen += 1
        self._steps.append((step_s, data_s, read_s))
        if self._seen < self._next:
            return None
        steps, waits, reads = map(sum, zip(*self._steps, strict=True))
        if waits <= TOLERATED * steps:
            return None
        self._next = 2 * self._seen
        told = f"{waits / steps:.0%} of the last {WINDOW} steps' time went into waiting for data"
        needed = self._needed(reads, steps - waits)
        if needed > max(1, self._workers):
            return f"{told}; data.num_workers={needed} would keep up"
        more = 2 * self._prefetch + 2
        return f"{told}, though reading is fast enough in the mean: steps differ, so set data.prefetch={more}"

    @staticmethod
    def _needed(reading_s: float, training_s: float) -> int:
        """Processes that read as fast as training goes, itself without the waits."""
        return ceil(ROOM * reading_s / max(training_s, 1e-9))
