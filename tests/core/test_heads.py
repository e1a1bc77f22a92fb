"""Shares of attention heads: as few on the busiest rank as there can be, and each head once."""

from itertools import product

import pytest

from dhp.core.heads import cuts_evenly, fills_evenly, head_range, share_heads

SHAPES = [(8, 8), (8, 2), (8, 1), (9, 3), (12, 8 // 2), (14, 2), (15, 5), (16, 16), (28, 4)]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ranks", "size", "count"),
    [
        (8, 8, 4, 1, 2),
        (8, 2, 4, 2, 1),  # each key/value head twice
        (8, 1, 8, 1, 1),
        (12, 3, 2, 2, 3),
        (9, 3, 2, 1, 5),  # 5 and 4: whole key/value heads would be 6 and 3
        (9, 3, 3, 3, 1),
        (16, 16, 3, 1, 6),
        (28, 4, 8, 4, 1),  # of 7, 4 and 3
    ],
)
def test_shares(heads: int, kv_heads: int, ranks: int, size: int, count: int) -> None:
    shares = share_heads(heads, kv_heads, ranks)
    assert (shares.size, shares.count) == (size, count)


@pytest.mark.parametrize(("heads", "kv_heads"), SHAPES)
def test_no_rank_has_more_than_it_must(heads: int, kv_heads: int) -> None:
    for ranks in range(1, heads + 1):
        shares = share_heads(heads, kv_heads, ranks)
        assert shares.a_rank == -(-heads // ranks)
        assert shares.subsets <= ranks * shares.count
        assert fills_evenly(heads, kv_heads, ranks) == (heads % ranks == 0 and shares.a_rank * ranks == heads)


@pytest.mark.parametrize(("heads", "kv_heads"), SHAPES)
def test_ranges_have_each_head_once_beside_its_keys(heads: int, kv_heads: int) -> None:
    for ranks in range(1, heads + 1):
        ranges = [head_range(heads, kv_heads, ranks, rank) for rank in range(ranks)]
        assert [own.first for own in ranges] == [0, *(own.end for own in ranges[:-1])] and ranges[-1].end == heads
        for own in ranges:
            keys = [own.first_kv + at for at, times in enumerate(own.repeats) for _ in range(times)]
            queries = (own.end - own.first) // len(keys)
            seen = [key for key, _ in product(keys, range(queries))]
            assert seen == [head // (heads // kv_heads) for head in range(own.first, own.end)]
        lengths = {own.end - own.first for own in ranges}
        assert max(lengths) - min(lengths) <= share_heads(heads, kv_heads, ranks, filled=False).size


def test_even_cuts() -> None:
    assert cuts_evenly(28, 4, 2) and cuts_evenly(28, 4, 28) and cuts_evenly(16, 2, 4)
    assert not cuts_evenly(9, 3, 2) and not cuts_evenly(24, 4, 6) and not cuts_evenly(28, 4, 8)
