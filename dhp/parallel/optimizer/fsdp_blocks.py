"""The blocks of a whole parameter that this rank holds when its slice is sharded by rows once more.

Tensor ranks cut a parameter into slices, and the ranks that hold the same slice shard it by rows (FSDP). What a rank
then has is one block of the whole, or several where the slice itself is made of several: a fused matrix, of which a
tensor rank has a slice of each part.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from dhp.parallel.tensor.local_shards import Cut


class RowBlock(NamedTuple):
    """Rows `first` to `first + rows` of what this rank holds are the block of the whole that begins at `offset`."""

    first: int
    rows: int
    offset: tuple[int, ...]


def shard_rows(slice_shape: torch.Size, mesh: DeviceMesh) -> range:
    """The rows of a slice that this rank holds when `mesh` shards it as `fully_shard` does."""
    shape, offset = compute_local_shape_and_global_offset(slice_shape, mesh, [Shard(0)])
    return range(offset[0], offset[0] + shape[0])


def held_blocks(rows: range, slice_shape: torch.Size, cut: Cut | None) -> list[RowBlock]:
    """Blocks of the whole parameter that `rows` of a slice of `slice_shape` are; cut: how slices are cut, None: not."""
    found = []
    for begin, offset in _runs(slice_shape, cut):
        first, last = max(rows.start, begin.start), min(rows.stop, begin.stop)
        if first < last:
            found.append(RowBlock(first - rows.start, last - first, (offset[0] + first - begin.start, *offset[1:])))
    return found


def _runs(slice_shape: torch.Size, cut: Cut | None) -> Sequence[tuple[range, tuple[int, ...]]]:
    """Rows of the slice that are consecutive in the whole, and where their block begins there."""
    whole = range(slice_shape[0])
    if cut is None:
        return [(whole, (0,) * len(slice_shape))]
    (placement,) = cut.placements
    if not isinstance(placement, _StridedShard):
        _, offset = compute_local_shape_and_global_offset(cut.shape, cut.mesh, cut.placements)
        return [(whole, tuple(offset))]
    parts, each = placement.split_factor, slice_shape[0] // placement.split_factor
    of_whole, own = cut.shape[0] // parts, cut.mesh.get_local_rank()
    rest = (0,) * (len(slice_shape) - 1)
    return [(range(part * each, (part + 1) * each), (part * of_whole + own * each, *rest)) for part in range(parts)]
