"""One clock for all processes of a run: what to add to another host's monotonic clock to get this one's."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

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
    return best[1]
