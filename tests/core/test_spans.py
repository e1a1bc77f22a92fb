"""Spans: kept only when asked for, taken once."""

import time
from collections.abc import Iterator

import pytest

from dhp.core import tracing
from dhp.core.tracing import DATA, WAIT, add_span, keep_spans, span, take_spans


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    tracing._recorded = None
    yield
    tracing._recorded = None


def test_nothing_is_kept_unless_asked_for() -> None:
    with span("a", DATA):
        pass
    add_span("b", WAIT, 1, 2)
    assert take_spans() == []


def test_blocks_are_kept_with_their_times_and_taken_once() -> None:
    keep_spans()
    before = time.perf_counter_ns()
    with span("outer", DATA), span("inner", WAIT):
        pass
    inner, outer = take_spans()
    assert (inner.name, inner.kind, outer.name, outer.kind) == ("inner", WAIT, "outer", DATA)
    assert before <= outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns <= time.perf_counter_ns()
    assert take_spans() == []


def test_a_block_that_raises_is_kept_too() -> None:
    keep_spans()
    with pytest.raises(KeyError), span("fails", DATA):
        raise KeyError
    assert [kept.name for kept in take_spans()] == ["fails"]
