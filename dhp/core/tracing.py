"""Spans of time and bytes sent, recorded per process."""

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


# The kinds that metrics distinguish. RING: messages from one rank to another, which only rings send.
ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL = "all_reduce", "all_gather", "reduce_scatter", "all_to_all"
BROADCAST, REDUCE, GATHER, SCATTER = "broadcast", "reduce", "gather", "scatter"
RING, HANDOFF = "ring", "handoff"
BARRIER = "barrier"  # which sends nothing

EXCHANGE_TAG = 1  # of messages that together are an all-to-all

_sent: dict[str, float] = {}


def add_sent(kind: str, nbytes: float) -> None:
    """Count what has been sent. A share of a collective need not be a whole number."""
    if nbytes:
        _sent[kind] = _sent.get(kind, 0) + nbytes


def take_sent() -> dict[str, int]:
    """Bytes by kind since the last call, rounded; kinds without any are left out."""
    taken = {kind: round(nbytes) for kind, nbytes in _sent.items()}
    _sent.clear()
    return taken


_waited_s = 0.0


def add_waited(seconds: float) -> None:
    """Count time in which a collective was called or waited for."""
    global _waited_s
    _waited_s += seconds


def forget() -> None:
    """Leave out what was counted since the last call: it belongs to no step."""
    take_sent()
    take_waited()


def waited() -> float:
    """Seconds in collectives since they were taken last."""
    return _waited_s


def take_waited() -> float:
    """Seconds in collectives since the last call."""
    global _waited_s
    taken, _waited_s = _waited_s, 0.0
    return taken
