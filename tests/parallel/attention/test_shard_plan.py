"""A plan of shards draws itself: which rank holds which tokens."""

from __future__ import annotations

from dhp.parallel.attention.shard_plan import contiguous_plan, zigzag_plan
from tests.helpers.figures import ROOT

ZIGZAG = """\
ring 0 ulysses 0  aaaa........aaaabbbbbbbb........................................  16 tokens
ring 0 ulysses 1  ........................bbbb........................bbbbbbbbbbbb  16 tokens
ring 1 ulysses 0  ....aaaaaaaa................bbbbbbbb............................  16 tokens
ring 1 ulysses 1  ....................................bbbbbbbbbbbbbbbb............  16 tokens"""


def test_a_zigzag_of_two_segments_on_two_by_two_ranks() -> None:
    """Each ring rank has the first and last quarter of each segment, or the two between; the page shows the same."""
    assert zigzag_plan([16, 48], 2, 2).draw() == ZIGZAG
    assert ZIGZAG in (ROOT / "docs" / "developers" / "attention.md").read_text(encoding="utf-8")


def test_a_column_shows_its_first_token() -> None:
    drawn = contiguous_plan([3000, 1000], 1, 2).draw(width=8)
    assert drawn == "ring 0 ulysses 0  aaaa....  2,000 tokens\nring 0 ulysses 1  ....aabb  2,000 tokens"


def test_nothing_is_held_of_an_empty_sequence() -> None:
    assert contiguous_plan([], 1, 1).draw() == "ring 0 ulysses 0    0 tokens"
