"""Learned positions of patches: entries and weights are the library's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from dhp.models.tower import Kernel, cubic, interpolate, linear

GRIDS = torch.tensor([(1, 2, 2), (1, 6, 10), (1, 12, 14), (2, 6, 4), (1, 2, 30), (3, 8, 6)])
KERNELS = [
    pytest.param(linear, {"mode": "bilinear", "align_corners": True}, id="linear"),
    pytest.param(cubic, {"mode": "bicubic", "align_corners": False}, id="cubic"),
]


def positions() -> torch.Tensor:
    sizes = [grid[1:].expand(int(grid.prod()), 2) for grid in GRIDS]
    return torch.cat([get_vision_position_ids(GRIDS, 2), torch.cat(sizes)], dim=1)


@pytest.mark.parametrize("side", [5, 48])
@pytest.mark.parametrize(("kernel", "mode"), KERNELS)
def test_it_equals_the_librarys_to_the_bit(kernel: Kernel, mode: dict[str, Any], side: int) -> None:
    theirs = get_vision_interpolation_indices_and_weights(GRIDS, side, spatial_merge_size=2, **mode)
    assert all(torch.equal(mine, other) for mine, other in zip(interpolate(positions(), side, kernel), theirs))


@pytest.mark.parametrize("kernel", [linear, cubic])
def test_a_dummy_has_a_place_in_the_table(kernel: Kernel) -> None:
    indices, weights = interpolate(torch.zeros(4, 4, dtype=torch.long), 5, kernel)
    assert indices.min() >= 0 and indices.max() < 25
    assert torch.allclose(weights.sum(1), torch.ones(4))
