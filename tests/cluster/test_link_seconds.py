"""What two processes send each other."""

from __future__ import annotations

import math

import pytest
import torch

from dhp.cluster import link_seconds
from dhp.cluster.link_seconds import measure_links
from dhp.core.errors import ClusterError


def test_both_ways_of_sending_take_time() -> None:
    found = measure_links("cpu", 1, (1 << 17, 1 << 20))
    assert found.sums is not None
    for pairs in (found.sums, found.handovers):
        assert [size for size, _ in pairs] == [1 << 17, 1 << 20]
        assert all(0 < seconds < math.inf for _, seconds in pairs)


def test_a_process_that_fails_is_named() -> None:
    with pytest.raises(ClusterError, match="failed: .*plan with the rates of a known device"):
        measure_links("no device", 1, (1 << 17,))


def test_no_answer_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_seconds, "TIMEOUT_S", 0.0)
    with pytest.raises(ClusterError, match="no answer"):
        measure_links("cpu", 1, (1 << 17,))


def test_what_opens_a_connection_is_no_part_of_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum of 3 s beside 2 s of computing, whose first two calls take 100 s, on a clock of the test's own."""
    now, calls = [0.0], [0]
    monkeypatch.setattr(link_seconds.time, "perf_counter", lambda: now[0])

    def computing() -> None:
        now[0] += 2.0

    def run() -> None:
        calls[0] += 1
        now[0] += 100.0 if calls[0] <= 2 else 3.0

    assert link_seconds._beside(run, computing, torch.device("cpu")) == 3.0
