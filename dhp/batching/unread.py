"""Reads the patches of long videos where one shard's work is prepared, no more of them than that shard has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dhp.base.messages import UnreadPatches, VisionInput

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
