"""What a process has sent: added up by kind, taken once."""

from __future__ import annotations

from dhp.core.tracing import ALL_REDUCE, HANDOFF, RING, add_sent, take_sent


def test_bytes_add_up_and_are_taken_once() -> None:
    take_sent()
    for kind, nbytes in ((ALL_REDUCE, 8 / 3), (HANDOFF, 5), (ALL_REDUCE, 16 / 3), (RING, 0)):
        add_sent(kind, nbytes)
    assert take_sent() == {ALL_REDUCE: 8, HANDOFF: 5}
    assert take_sent() == {}
