"""What two processes send each other."""

from __future__ import annotations

import math

import pytest

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
