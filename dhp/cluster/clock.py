"""One clock for all processes of a run."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from dhp.core.reports import Spent
from dhp.core.tracing import waited

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

    0 on this host. Off by at most half of that question's round trip."""
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
    """Adds up stretches of time by kind until they are taken.

    On a GPU a method returns when it has submitted its kernels, so a stretch is what the stream takes from what it does
    before the method's first kernel to its last one. It is known when that has run; nothing waits for it, and what is
    not known yet when the time is taken counts for the next step."""

    def __init__(self, cuda: bool) -> None:
        self._cuda = cuda
        self._seconds: dict[str, float] = {}
        self._comm: dict[str, float] = {}
        self._running: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def measured(self, kind: str) -> Iterator[None]:
        """The time that the block takes counts for its kind."""
        if not self._cuda:
            start, before = time.perf_counter(), waited()
            yield
            self._add(kind, time.perf_counter() - start)
            self._comm[kind] = self._comm.get(kind, 0.0) + max(0.0, waited() - before)  # less: they were taken
            return
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        yield
        end.record()
        self._running.append((kind, begin, end))

    def take(self, last: str, comm_s: float | None) -> dict[str, Spent]:
        """By kind, since the last time. comm_s: seconds in collectives of all kinds together. What the stretches before
        do not have of them is of the kind `last`, in which they were taken."""
        while self._running and self._running[0][2].query():
            kind, begin, end = self._running.popleft()
            self._add(kind, begin.elapsed_time(end) / 1e3)
        seconds, self._seconds = self._seconds, {}
        comm, self._comm = self._comm, {}
        if self._cuda or comm_s is None:
            return {kind: Spent(of, None) for kind, of in seconds.items()}
        comm[last] = max(0.0, comm_s - sum(of for kind, of in comm.items() if kind != last))
        return {kind: Spent(max(0.0, of - comm.get(kind, 0.0)), comm.get(kind, 0.0)) for kind, of in seconds.items()}

    def _add(self, kind: str, seconds: float) -> None:
        self._seconds[kind] = self._seconds.get(kind, 0.0) + seconds
