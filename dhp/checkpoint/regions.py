"""Regions of a tensor: blocks, and ranges of elements in row-major order, which are blocks one after another.

A piece of a checkpoint is either kind, and so is what a rank wants; each common part is a block of both. So a rank
reads from any layout's pieces the elements that it holds, and no others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

_PAIRS = 512  # pieces of one tensor up to which each pair is compared


@dataclass(frozen=True)
class Block:
    """The elements from `offset` on, `shape` of them along each dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """Elements."""
        return prod(self.shape)

    def common(self, other: Block) -> Block | None:
        """The elements of both; None: there are none."""
        begins = tuple(map(max, self.offset, other.offset))
        ends = map(min, self._ends(), other._ends())
        shape = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        return None if any(n <= 0 for n in shape) else Block(begins, shape)

    def slices(self, outer: Block) -> tuple[slice, ...]:
        """Where these elements are in a tensor that holds those of `outer`."""
        begins = [own - of for own, of in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(begin, begin + n) for begin, n in zip(begins, self.shape, strict=True))

    def _ends(self) -> Iterator[int]:
        return (begin + n for begin, n in zip(self.offset, self.shape, strict=True))


def whole(shape: Sequence[int]) -> Block:
    """All elements of a tensor."""
    return Block((0,) * len(shape), tuple(shape))


def blocks_of_range(shape: Sequence[int], start: int, count: int) -> list[Block]:
    """The blocks that `count` elements from the `start`-th on are, in that order: at most two a dimension, and one.

    Each has full extent in all dimensions behind its first one that is longer than 1, so that its elements are
    consecutive in the tensor.
    """
    return list(_blocks(tuple(shape), start, start + count, ()))


def _blocks(shape: tuple[int, ...], first: int, last: int, prefix: tuple[int, ...]) -> Iterator[Block]:
    """prefix: the indices of the dimensions before those of `shape`."""
    if first >= last:
        return
    ones = (1,) * len(prefix)
    if not shape:
        yield Block(prefix, ones)
        return
    length, rest = prod(shape[1:]), shape[1:]
    row, begin = divmod(first, length)
    end_row, end = divmod(last, length)
    if row == end_row:
        yield from _blocks(rest, begin, end, (*prefix, row))
        return
    if begin:
        yield from _blocks(rest, begin, length, (*prefix, row))
        row += 1
    if row < end_row:
        yield Block((*prefix, row, *(0 for _ in rest)), (*ones, end_row - row, *rest))
    yield from _blocks(rest, 0, end, (*prefix, end_row))


def overlap(blocks: Sequence[Block]) -> bool:
    """Whether two of the blocks have an element in common. Of very many, blocks that begin at one place are looked
    for."""
    filled = [block for block in blocks if block.count]
    if len(filled) > _PAIRS:
        return len({block.offset for block in filled}) < len(filled)
    if len(filled) < 2 or not filled[0].shape:
        return len(filled) > 1
    begins = np.array([block.offset for block in filled])
    ends = begins + np.array([block.shape for block in filled])
    common = np.minimum(ends[:, None], ends[None]) > np.maximum(begins[:, None], begins[None])
    return int(common.all(axis=2).sum()) > len(filled)  # each meets itself
