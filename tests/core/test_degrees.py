"""Degrees as numbers of ranks and as words."""

from __future__ import annotations

from dhp.core.axes import Degrees


def test_ranks_that_share_out_experts_are_an_axis_inside_of_data() -> None:
    split = Degrees(data=6, expert=2)
    assert split.by_axis() == {"data": 3, "expert": 2, "ring": 1, "ulysses": 1, "tensor": 1}
    assert (split.world, split.shards, split.holders) == (6, 6, 2)
    assert Degrees(data=2, tensor=4).by_axis() == {"data": 2, "ring": 1, "ulysses": 1, "tensor": 4}
    assert Degrees(data=2, tensor=4).holders == 4


def test_they_are_told() -> None:
    assert str(Degrees(data=6, expert=2)) == "data 6 (expert 2)"
    assert str(Degrees()) == "one rank"
