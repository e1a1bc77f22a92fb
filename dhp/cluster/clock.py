"""One clock for all processes of a run, and the time that a rank computes."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ROUNDS = 8


@dataclass(frozen=True)
class ClockReading:
    """The monotonic clock of a host. Processes of one host share it."""

    host: str
    ns: int


def read_clock() -> ClockReading:
    """This process's clock, now."""
    return ClockReading(_BOOT_ID.read_text().strip() if _BOOT_ID.exists() else "", time.perf_counter_ns())


def offset_ns(read_other: Callable[[], ClockReading]) -> int:
    """What to add to the other's clock, from the fastest of a few questions: it was read half way (Cristian 1989).

    0 on this host. Off by at most half of that question's round trip.
    """
    best: tuple[int, int] | None = None
    for _ in range(_ROUNDS):
        before = read_clock()
        other = read_other()
        after = read_clock()
        if other.host == before.host:
            return 0
        took = after.ns - before.ns
        if best is None or took < best[0]:
            best = took, (before.ns + after.ns) // 2 - other.ns
    assert best is not None
    return best[1]


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
