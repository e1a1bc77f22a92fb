"""Checks whether reading keeps up with training, and what would help where it does not."""

from __future__ import annotations

from collections import deque
from math import ceil

STALL_WINDOW = 20  # steps that are looked at together
TOLERATED_WAIT = 0.02  # of the step time may be spent waiting for data
SPARE_SPEED = 1.1  # times the mean: reading should be so much faster, because steps differ


class DataStall:
    """One run's waits for data. workers, prefetch: data.num_workers, and the steps that are read ahead.

    windows: samples are measured while the run goes on.
    """

    def __init__(self, workers: int, prefetch: int, windows: bool = False) -> None:
        self._workers, self._prefetch, self._windows = workers, prefetch, windows
        self._steps: deque[tuple[float, float, float, float]] = deque(maxlen=STALL_WINDOW)
        self._seen = 0
        self._next = STALL_WINDOW + 1  # the first step waits for its data however fast reading is

    def add(self, step_s: float, data_s: float, read_s: float, measure_s: float) -> str | None:
        """A step has ended. A message for the user, now and then, while more than 2% of the time goes into waiting.

        step_s: seconds of the step. data_s: seconds of them spent waiting for data. read_s: seconds that one process
        spent reading it. measure_s: seconds that the dataset actor spent choosing its samples.
        """
        self._seen += 1
        self._steps.append((step_s, data_s, read_s, measure_s))
        if self._seen < self._next:
            return None
        steps, waits, reads, measuring = map(sum, zip(*self._steps, strict=True))
        if waits <= TOLERATED_WAIT * steps:
            return None
        self._next = 2 * self._seen
        share = f"{waits / steps:.0%} of the last {STALL_WINDOW} steps' time went into waiting for data"
        if self._windows and measuring > steps - waits:
            return (
                f"{share}: one process measures the samples of each window (data.balance_window) and takes longer than "
                "the steps do. `python -m dhp inspect data` measures all of them once; runs find them in data.cache_dir"
            )
        if not self._workers:
            reads += measuring  # the same process
        needed = self._needed(reads, steps - waits)
        if needed > max(1, self._workers):
            return f"{share}; data.num_workers={needed} would keep up"
        more = 2 * self._prefetch + 2
        return f"{share}, though reading is fast enough in the mean: steps differ, so set data.prefetch={more}"

    @staticmethod
    def _needed(reading_s: float, training_s: float) -> int:
        """Processes that read as fast as training goes, itself without the waits."""
        return ceil(SPARE_SPEED * reading_s / max(training_s, 1e-9))
