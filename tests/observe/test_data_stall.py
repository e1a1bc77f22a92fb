"""What a run says when it waits for data."""

from __future__ import annotations

from dhp.observe.summary import STALL_WINDOW, DataStall


def told(
    watch: DataStall, steps: int, step_s: float, data_s: float, read_s: float, measure_s: float = 0.0
) -> list[tuple[int, str]]:
    found = [(step, watch.add(step_s, data_s, read_s, measure_s)) for step in range(1, steps + 1)]
    return [(step, text) for step, text in found if text]


def test_the_number_of_workers_that_would_keep_up() -> None:
    # A step trains for 1 s and takes 4 s to read: 5 workers, with room.
    messages = told(DataStall(workers=2, prefetch=2), 30, step_s=2.0, data_s=1.0, read_s=4.0)
    assert messages == [
        (
            STALL_WINDOW + 1,
            "50% of the last 20 steps' time went into waiting for data; data.num_workers=5 would keep up",
        )
    ]


def test_it_is_repeated_more_and_more_seldom() -> None:
    steps = [step for step, _ in told(DataStall(0, 0), 200, 2.0, 1.0, 1.5)]
    assert steps == [21, 42, 84, 168]


def test_two_percent_are_tolerated() -> None:
    assert told(DataStall(0, 0), 100, step_s=1.0, data_s=0.019, read_s=0.9) == []
    assert told(DataStall(0, 0), 100, step_s=1.0, data_s=0.021, read_s=0.9)


def test_the_first_step_does_not_count() -> None:
    watch = DataStall(0, 0)
    assert watch.add(9.0, 8.0, 8.0, 0.0) is None
    assert told(watch, 100, 1.0, 0.0, 0.5) == []


def test_uneven_steps_need_more_read_ahead() -> None:
    ((_, text), *_) = told(DataStall(workers=3, prefetch=3), 25, step_s=1.0, data_s=0.1, read_s=1.2)
    assert text.endswith("steps differ, so set data.prefetch=8")


def test_measuring_that_is_slower_than_the_steps_is_named() -> None:
    """More workers would not help: one process measures."""
    ((_, text), *_) = told(DataStall(2, 2, windows=True), 25, step_s=1.0, data_s=0.4, read_s=0.1, measure_s=0.7)
    assert "one process measures the samples of each window" in text and "inspect data" in text


def test_without_workers_measuring_and_reading_take_turns() -> None:
    ((_, text), *_) = told(DataStall(workers=0, prefetch=2), 25, step_s=1.0, data_s=0.2, read_s=0.5, measure_s=0.5)
    assert text.endswith("data.num_workers=2 would keep up")
    ((_, text), *_) = told(DataStall(workers=1, prefetch=2), 25, step_s=1.0, data_s=0.2, read_s=0.5, measure_s=0.5)
    assert text.endswith("set data.prefetch=6")
