"""Blocks and ranges: every range is the blocks that it is said to be, in their order."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch

from dhp.checkpoint.shard_files import RegionBlock, blocks_of_range, overlap, whole


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3), (3, 1, 4), (2, 3, 2, 2), (1, 1), (4, 0)])
def test_each_range_is_its_blocks_one_after_another(shape: tuple[int, ...]) -> None:
    count = prod(shape)
    numbers = torch.arange(count).view(shape)
    for start, stop in product(range(count + 1), repeat=2):
        blocks = blocks_of_range(shape, start, max(0, stop - start))
        found = [int(n) for block in blocks for n in numbers[block.slices(whole(shape))].flatten()]
        assert found == list(range(start, max(start, stop)))
        assert len(blocks) <= max(1, 2 * len(shape) - 1) and all(block.count for block in blocks)


def test_what_two_blocks_have_in_common() -> None:
    one, other = RegionBlock((1, 0), (3, 4)), RegionBlock((2, 2), (5, 5))
    common = one.common(other)
    assert common == RegionBlock((2, 2), (2, 2)) == other.common(one)
    assert common.slices(one) == (slice(1, 3), slice(2, 4)) and common.slices(other) == (slice(0, 2), slice(0, 2))
    assert one.common(RegionBlock((4, 0), (1, 1))) is None
    assert RegionBlock((), ()).common(RegionBlock((), ())) == RegionBlock((), ())


def test_blocks_that_share_an_element_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [RegionBlock((n, 0), (1, 4)) for n in range(4)]
    assert not overlap(rows) and not overlap([]) and not overlap(rows[:1])
    assert overlap([*rows, RegionBlock((2, 3), (1, 1))]) and overlap([RegionBlock((), ()), RegionBlock((), ())])
    assert not overlap([*rows, RegionBlock((0, 0), (0, 4))])  # one without elements
    monkeypatch.setattr("dhp.checkpoint.shard_files._PAIRS", 2)
    assert overlap([*rows, rows[1]]) and not overlap(rows)
