"""Patches of a shard: their full-attention segments, and those that are still in a video's file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dhp.batch.assign_images import Piece, Pieces
from dhp.core.batch import UnreadPatches, VisionInput
from dhp.models.types import ImageLayout


def lay_out(
    layouts: Sequence[ImageLayout], group: Sequence[Pieces], dummy: int
) -> tuple[tuple[int, ...], tuple[tuple[tuple[int, int, int], ...], ...]]:
    """Lengths of the full-attention segments of a group of ranks, and each rank's ranges of them.

    A rank without pieces has a dummy window, which is a segment of its own.
    """
    numbers: dict[tuple[int, int], int] = {}  # of a segment by image and frame
    lengths: list[int] = []
    shards = []
    for pieces in group:
        ranges = []
        for piece in pieces:
            for frame, first, count in _frames(layouts[piece.image], piece):
                number = numbers.setdefault((piece.image, frame), len(lengths))
                if number == len(lengths):
                    lengths.append(layouts[piece.image].frame_lengths[frame])
                ranges.append((number, first, count))
        if not pieces:
            ranges.append((len(lengths), 0, dummy))
            lengths.append(dummy)
        shards.append(tuple(ranges))
    return tuple(lengths), tuple(shards)


def _frames(layout: ImageLayout, piece: Piece) -> Iterator[tuple[int, int, int]]:
    """The frames that a piece touches, with its first patch in each and the number of its patches there."""
    begin, end = (sum(layout.window_lengths[:w]) for w in (piece.first, piece.last))
    start = 0
    for frame, length in enumerate(layout.frame_lengths):
        first, last = max(begin - start, 0), min(end - start, length)
        if first < last:
            yield frame, first, last - first
        start += length


# Of a long video, some patches: parts of them, each with its places among those asked for.
ReadPatches = Callable[[Any, np.ndarray], Iterator[tuple[np.ndarray, np.ndarray]]]


def fill(work: VisionInput, read: ReadPatches) -> VisionInput:
    """A shard's work with all its pixels, and at most one more part of a video in memory. Raises as `read` does."""
    if not work.unread:
        return work
    pixels: Tensor | None = None
    first = 0
    for piece in work.unread:
        last = first + count_patches(piece)
        for places, patches in _parts(piece, read):
            if pixels is None:
                pixels = work.pixels.new_empty(len(work.pixels), patches.shape[1])
            pixels[first:last][places] = patches.to(pixels.dtype)
        first = last
    assert pixels is not None  # a shard has at least a dummy
    return replace(work, pixels=pixels, unread=())


def nothing_unread(video: Any, rows: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """`ReadPatches` for samples that have all their pixels: always raises."""
    raise AssertionError(f"{len(rows)} patches of {video} are unread, though no sample was to be read in parts")


def count_patches(piece: Tensor | UnreadPatches) -> int:
    """How many a piece of a shard's work has."""
    return len(piece) if isinstance(piece, Tensor) else len(piece.rows)


def _parts(piece: Tensor | UnreadPatches, read: ReadPatches) -> Iterable[tuple[Tensor | slice, Tensor]]:
    if isinstance(piece, Tensor):
        return [(slice(None), piece)]
    parts = read(piece.video, piece.rows.numpy())
    return ((torch.from_numpy(places), torch.from_numpy(patches)) for places, patches in parts)
