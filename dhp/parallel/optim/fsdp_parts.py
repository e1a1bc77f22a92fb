"""What FSDP2 and ZeRO-3 wrap, and the blocks of a parameter that a rank holds when its slice is sharded by rows.

Tensor ranks cut a parameter into slices, and the ranks that hold the same slice shard it by rows (FSDP). What a rank
then has is one block of the whole, or several where the slice itself is made of several: a fused matrix, of which a
tensor rank has a slice of each part.

ZeRO-3 and FSDP gather weights around a module's own forward. A stage's computation takes weights from outside of it
(the loss, the head's), so the computation runs as the forward of the module that holds them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_map_only

from dhp.parallel.tensor.slices import Cut


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


class Computation(nn.Module):
    """`Computation(module)(compute=f)` is `f()`, seen by hooks as a forward of something that has `module` inside."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def forward(self, compute: Callable[[], Any]) -> Any:
        """The result of `compute`: tensors of its own, even where they are the output of a module inside.

        Hooks on one tensor would run in the order in which they came, a layer's before the root's, and on two tensors
        the other way round: ranks of which one alone adds something behind its last layer would gather weights in
        different orders.
        """
        return tree_map_only(Tensor, _Boundary.apply, compute())


class _Boundary(torch.autograd.Function):
    """A tensor with the values and the memory of another one, which autograd does not take for a view of it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
