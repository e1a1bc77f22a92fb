"""Where the values that a rank holds of a tensor lie in the whole, for optimizers whose step needs more than one rank's
share: sums over rows and columns, or all of a matrix.

Tensor ranks cut a tensor along one dimension, of a fused matrix part by part; ranks that hold the same slice cut it by
rows. What a rank has are some numbers of each dimension, at most one of them with gaps.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dhp.parallel.optim.base import ScalingOptimizer
from dhp.parallel.tensor.slices import Cut

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

    A state has its weight's shape, or where its kind is among `dhp.core.state_forms.FACTORS`, is whole on every rank.
    """

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

    def place(self, weight: Tensor, rows: range, slice_shape: torch.Size, cut: Cut | None, group: Any) -> None:
        """Let the optimizer know that `weight` is `rows` of a slice that is `cut`, the others being `group`'s."""
        if slice_shape and dist.get_world_size(group) > 1:
            self.shared[weight] = Shared(find_place(rows, slice_shape, cut), group)


def find_place(rows: range, slice_shape: torch.Size, cut: Cut | None) -> Place:
    """The place of `rows` of a slice of `slice_shape`. cut: how slices are cut from the whole; None: not."""
    numbers = [torch.arange(length) for length in slice_shape]
    whole = tuple(slice_shape if cut is None else cut.shape)
    if cut is not None:
        placement: Any
        (placement,) = cut.placements
        along = torch.arange(whole[placement.dim])
        along = along.view([-1 if dim == placement.dim else 1 for dim in range(len(whole))])
        pieces, _ = placement._split_tensor(along, cut.mesh.size(), with_padding=False, contiguous=True)
        numbers[placement.dim] = pieces[cut.mesh.get_local_rank()].flatten()
    numbers[0] = numbers[0][rows.start : rows.stop]
    return Place(whole, tuple(map(_as_range, numbers)))


def _as_range(numbers: Tensor) -> Numbers:
    if not len(numbers):
        return slice(0, 0)
    first, last = int(numbers[0]), int(numbers[-1])
    return slice(first, last + 1) if last - first + 1 == len(numbers) else numbers
