"""One clock over several hosts."""

from __future__ import annotations

import time

from dhp.cluster.clock import ClockReading, offset_ns, read_clock


def test_processes_of_one_host_share_the_clock() -> None:
    assert offset_ns(read_clock) == 0


def test_another_hosts_clock_is_placed_by_the_fastest_answer() -> None:
    ahead = 5_000_000_000

    def other() -> ClockReading:
        return ClockReading("another host", time.perf_counter_ns() + ahead)

    assert abs(offset_ns(other) + ahead) < 50_000_000
