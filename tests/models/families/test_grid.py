"""A tower of patches in a row: what it is told in the place of grids."""

from __future__ import annotations

import torch

from dhp.models.families.grid import runs_of_one_size
from dhp.models.families.kimi_k25 import merge_order


def test_patches_of_frames_of_one_size_are_one_run() -> None:
    sizes = torch.tensor([[4, 6]] * 3 + [[2, 2]] * 2 + [[4, 6]])
    grids, bounds = runs_of_one_size(torch.cat([torch.zeros_like(sizes), sizes], dim=1))
    assert grids.tolist() == [[1, 4, 6], [1, 2, 2], [1, 4, 6]]
    assert bounds.tolist() == [0, 3, 5, 6] and bounds.dtype == torch.int32


def test_a_dummy_is_in_a_frame_that_has_a_size() -> None:
    grids, bounds = runs_of_one_size(torch.zeros(4, 4, dtype=torch.long))
    assert grids.tolist() == [[1, 1, 1]] and bounds.tolist() == [0, 4]


def test_squares_that_merge_lie_one_behind_another() -> None:
    assert merge_order((1, 2, 4), 2).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    assert merge_order((2, 2, 2), 2).tolist() == list(range(8))
