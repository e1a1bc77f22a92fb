"""Bytes that this process has sent to other ranks and parts, by kind, accumulated until they are read."""

from __future__ import annotations

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
