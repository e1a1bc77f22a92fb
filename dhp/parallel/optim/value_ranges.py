"""Places of a rank's values in whole tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from dhp.core.torch_private import StridedShard, local_shape_and_offset, split_tensor, tree_map_only
from dhp.parallel.optim.base import ScalingOptimizer
from dhp.parallel.tensor.slices import AdapterCut

Numbers = slice | Tensor  # along a dimension: a range, or where there are gaps, int64


class Place(NamedTuple):
    """The elements of a tensor of shape `whole` that a rank holds: the product of `numbers`, one for each dimension."""

    whole: tuple[int, ...]
    numbers: tuple[Numbers, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of what the rank holds."""
        return tuple(of.stop - of.start if isinstance(of, slice) else len(of) for of in self.numbers)

    @property
    def count(self) -> int:
        """Elements that the rank holds."""
        return prod(self.shape)

    def of(self, *dims: int) -> Place:
        """The place along some dimensions alone."""
        return Place(tuple(self.whole[dim] for dim in dims), tuple(self.numbers[dim] for dim in dims))


class Shared(NamedTuple):
    """A tensor of which `group`'s ranks hold parts, each element on one of them; this rank's is at `place`."""

    place: Place
    group: dist.ProcessGroup


class PlacedOptimizer(ScalingOptimizer):
    """An optimizer whose step needs whole tensors. shared: by weight, those that are cut; set by who cuts them.

    A state has its weight's shape, or where its kind is among `dhp.core.parameters.FACTORS`, is whole on every rank."""

    def __init__(self, groups: Sequence[dict[str, Any]], defaults: dict[str, Any]):
        super().__init__(list(groups), defaults)
        self.shared: dict[Tensor, Shared] = {}

    def new_states(self, weight: Tensor) -> dict[str, Tensor]:
        """The states of a weight that no step has updated, by kind, as the optimizer keeps them."""
        raise NotImplementedError

    def by_ranks(self, weights: Sequence[Tensor]) -> dict[dist.ProcessGroup, list[int]]:
        """By group of ranks, which of these weights it shares, in an order that is the same on all of them."""
        found: dict[dist.ProcessGroup, list[int]] = {}
        for number, weight in enumerate(weights):
            if weight in self.shared:
                found.setdefault(self.shared[weight].group, []).append(number)
        return found

    def place(self, weight: Tensor, rows: range, slice_shape: torch.Size, cut: AdapterCut | None, group: Any) -> None:
        """Let the optimizer know that `weight` is `rows` of a slice that is `cut`, the others being `group`'s."""
        if slice_shape and dist.get_world_size(group) > 1:
            self.shared[weight] = Shared(find_place(rows, slice_shape, cut), group)


def find_place(rows: range, slice_shape: torch.Size, cut: AdapterCut | None) -> Place:
    """The place of `rows` of a slice of `slice_shape`. cut: how slices are cut from the whole; None: not."""
    numbers = [torch.arange(length) for length in slice_shape]
    whole = tuple(slice_shape if cut is None else cut.shape)
    if cut is not None:
        placement: Any
        for of_mesh, placement in enumerate(cut.placements):  # each along a dimension of its own
            along = torch.arange(whole[placement.dim])
            along = along.view([-1 if dim == placement.dim else 1 for dim in range(len(whole))])
            pieces = split_tensor(placement, along, cut.mesh.size(of_mesh))
            numbers[placement.dim] = pieces[cut.mesh.get_local_rank(of_mesh)].flatten()
    numbers[0] = numbers[0][rows.start : rows.stop]
    return Place(whole, tuple(map(_as_range, numbers)))


def _as_range(numbers: Tensor) -> Numbers:
    if not len(numbers):
        return slice(0, 0)
    first, last = int(numbers[0]), int(numbers[-1])
    return slice(first, last + 1) if last - first + 1 == len(numbers) else numbers


class HeldBlock(NamedTuple):
    """A part of what this rank holds: `here`, which is the block of the whole that begins at `offset`."""

    here: tuple[slice, ...]
    offset: tuple[int, ...]


def shard_rows(slice_shape: torch.Size, mesh: DeviceMesh) -> range:
    """The rows of a slice that this rank holds when `mesh` shards it as `fully_shard` does."""
    shape, offset = local_shape_and_offset(slice_shape, mesh, [Shard(0)])
    return range(offset[0], offset[0] + shape[0])


def held_blocks(rows: range, slice_shape: torch.Size, cut: AdapterCut | None) -> list[HeldBlock]:
    """Blocks of the whole parameter that `rows` of a slice of `slice_shape` are; cut: how slices are cut, None: not."""
    found = []
    for run, offset in _runs(slice_shape, cut):
        first, last = max(rows.start, run[0].start), min(rows.stop, run[0].stop)
        if first < last:
            here = (slice(first - rows.start, last - rows.start), *run[1:])
            found.append(HeldBlock(here, (offset[0] + first - run[0].start, *offset[1:])))
    return found


def _runs(slice_shape: torch.Size, cut: AdapterCut | None) -> Sequence[tuple[tuple[slice, ...], tuple[int, ...]]]:
    """Parts of the slice that are one block of the whole each, and where it begins there."""
    all_of = tuple(slice(0, length) for length in slice_shape)
    if cut is None:
        return [(all_of, (0,) * len(slice_shape))]
    *shares, placement = cut.placements  # shares of experts, each of which is cut
    if not isinstance(placement, StridedShard):
        _, offset = local_shape_and_offset(cut.shape, cut.mesh, cut.placements)
        return [(all_of, tuple(offset))]
    dim, parts = placement.dim, placement.split_factor
    each, of_whole, own = slice_shape[dim] // parts, cut.shape[dim] // parts, cut.mesh.get_local_rank(len(shares))
    found = []
    for part in range(parts):
        here, offset = list(all_of), [0] * len(slice_shape)
        offset[0] = cut.mesh.get_local_rank(0) * slice_shape[0] if shares else 0
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
        different orders."""
        return tree_map_only(Tensor, _Boundary.apply, compute())


class _Boundary(torch.autograd.Function):
    """A tensor with the values and the memory of another one, which autograd does not take for a view of it."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        return values.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
