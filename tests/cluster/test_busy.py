"""What counts as computing."""

from __future__ import annotations

import pytest

from dhp.cluster import clock
from dhp.cluster.clock import BusyTime


class Clock:
    """Told times, one at each question."""

    def __init__(self, *times: float) -> None:
        self._times = iter(times)

    def perf_counter(self) -> float:
        return next(self._times)


def test_stretches_add_up_until_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "time", Clock(1.0, 1.5, 10.0, 12.0, 20.0, 21.0))
    time = BusyTime(cuda=False)
    for _ in range(2):
        with time.measured():
            pass
    assert time.take() == 2.5
    with time.measured():
        pass
    assert (time.take(), time.take()) == (1.0, 0.0)


class Event:
    """Stands for torch.cuda.Event on a stream that has come as far as `done`, a millisecond from event to event."""

    recorded, done = 0, 0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        Event.recorded += 1
        self.at = Event.recorded

    def query(self) -> bool:
        return self.at <= Event.done

    def elapsed_time(self, end: Event) -> float:
        return float(end.at - self.at)


def test_on_a_gpu_nobody_waits_for_what_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.Event", Event)
    time = BusyTime(cuda=True)
    for _ in range(3):
        with time.measured():
            pass
    Event.done = 4  # two verbs are through
    assert time.take() == pytest.approx(0.002)
    Event.done = 6
    assert time.take() == pytest.approx(0.001)
