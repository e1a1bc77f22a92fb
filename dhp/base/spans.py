"""Named spans of time of one process, recorded only while a run is traced."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

# The kinds that a trace distinguishes.
FORWARD, BACKWARD, TRANSFER, COLLECTIVE = "forward", "backward", "transfer", "collective"
WAIT, DATA, OPTIMIZER, CHECKPOINT = "wait", "data", "optimizer", "checkpoint"


@dataclass(frozen=True)
class Span:
    """From `start_ns` to `end_ns` on this host's monotonic clock."""

    name: str
    kind: str
    start_ns: int
    end_ns: int


_recorded: list[Span] | None = None


def keep_spans() -> None:
    """Begin to record the spans of this process."""
    global _recorded
    _recorded = []


def take_spans() -> list[Span]:
    """The spans recorded since the last call."""
    global _recorded
    taken = _recorded or []
    if _recorded is not None:
        _recorded = []
    return taken


def add_span(name: str, kind: str, start_ns: int, end_ns: int) -> None:
    """Record a span whose ends are known already."""
    if _recorded is not None:
        _recorded.append(Span(name, kind, start_ns, end_ns))


@contextmanager
def span(name: str, kind: str) -> Iterator[None]:
    """Record the time that the block takes."""
    if _recorded is None:
        yield
        return
    start = time.perf_counter_ns()
    try:
        yield
    finally:
        add_span(name, kind, start, time.perf_counter_ns())
