"""The time that a rank computes in a step: that of its engine's methods, on the device that they run on."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class BusyTime:
    """Adds up stretches of time until they are taken.

    On a GPU a method returns when it has submitted its kernels, so a stretch is what the stream takes from what it does
    before the method's first kernel to its last one. It is known when that has run; nothing waits for it, and what is
    not known yet when the time is taken counts for the next step.
    """

    def __init__(self, cuda: bool) -> None:
        self._cuda, self._seconds = cuda, 0.0
        self._running: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def measured(self) -> Iterator[None]:
        """The time that the block takes."""
        if not self._cuda:
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._running.append((begin, end))

    def take(self) -> float:
        """Seconds since the last time."""
        while self._running and self._running[0][1].query():
            begin, end = self._running.popleft()
            self._seconds += begin.elapsed_time(end) / 1e3
        taken, self._seconds = self._seconds, 0.0
        return taken
