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


class HeldBlock(NamedTuple):
    """A part of what this rank holds: `here`, which is the block of the whole that begins at `offset`."""

    here: tuple[slice, ...]
    offset: tuple[int, ...]


def shard_rows(slice_shape: torch.Size, mesh: DeviceMesh) -> range:
    """The rows of a slice that this rank holds when `mesh` shards it as `fully_shard` does."""
    shape, offset = compute_local_shape_and_global_offset(slice_shape, mesh, [Shard(0)])
    return range(offset[0], offset[0] + shape[0])


def held_blocks(rows: range, slice_shape: torch.Size, cut: Cut | None) -> list[HeldBlock]:
    """Blocks of the whole parameter that `rows` of a slice of `slice_shape` are; cut: how slices are cut, None: not."""
    found = []
    for run, offset in _runs(slice_shape, cut):
        first, last = max(rows.start, run[0].start), min(rows.stop, run[0].stop)
        if first < last:
            here = (slice(first - rows.start, last - rows.start), *run[1:])
            found.append(HeldBlock(here, (offset[0] + first - run[0].start, *offset[1:])))
    return found


def _runs(slice_shape: torch.Size, cut: Cut | None) -> Sequence[tuple[tuple[slice, ...], tuple[int, ...]]]:
    """Parts of the slice that are one block of the whole each, and where it begins there."""
    all_of = tuple(slice(0, length) for length in slice_shape)
    if cut is None:
        return [(all_of, (0,) * len(slice_shape))]
    (placement,) = cut.placements
    if not isinstance(placement, _StridedShard):
        _, offset = compute_local_shape_and_global_offset(cut.shape, cut.mesh, cut.placements)
        return [(all_of, tuple(offset))]
    dim, parts = placement.dim, placement.split_factor
    each, of_whole, own = slice_shape[dim] // parts, cut.shape[dim] // parts, cut.mesh.get_local_rank()
    found = []
    for part in range(parts):
        here, offset = list(all_of), [0] * len(slice_shape)
        here[dim], offset[dim] = slice(part * each, (part + 1) * each), part * of_whole + own * each
        found.append((tuple(here), tuple(offset)))
    return found


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
