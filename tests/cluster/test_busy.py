"""What counts as computing."""

from __future__ import annotations

import pytest

from dhp.cluster import clock
from dhp.cluster.clock import BusyTime
from dhp.core.reports import Spent
from dhp.core.tracing import add_waited, take_waited


class Clock:
    """Told times, one at each question."""

    def __init__(self, *times: float) -> None:
        self._times = iter(times)

    def perf_counter(self) -> float:
        return next(self._times)


def test_stretches_add_up_until_they_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "time", Clock(1.0, 1.5, 10.0, 12.0, 20.0, 21.0))
    time = BusyTime(cuda=False)
    for kind in ("forward", "backward"):
        with time.measured(kind):
            pass
    assert time.take("backward", 0.0) == {"forward": Spent(0.5, 0.0), "backward": Spent(2.0, 0.0)}
    with time.measured("forward"):
        pass
    assert (time.take("optimizer", 0.0), time.take("optimizer", 0.0)) == ({"forward": Spent(1.0, 0.0)}, {})


def test_collectives_count_for_the_kind_that_made_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The optimizer's method takes what was counted, so what is left of it is its own."""
    monkeypatch.setattr(clock, "time", Clock(0.0, 2.0, 2.0, 3.0))
    take_waited()
    time = BusyTime(cuda=False)
    with time.measured("forward"):
        add_waited(0.5)
    with time.measured("optimizer"):
        add_waited(0.25)
        whole = take_waited()
    assert time.take("optimizer", whole) == {"forward": Spent(1.5, 0.5), "optimizer": Spent(0.75, 0.25)}


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
        with time.measured("forward"):
            pass
    Event.done = 4  # two verbs are through
    assert time.take("forward", None) == {"forward": Spent(pytest.approx(0.002), None)}
    Event.done = 6
    assert time.take("forward", None) == {"forward": Spent(pytest.approx(0.001), None)}
