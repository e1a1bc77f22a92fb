"""Which vision rank works on which windows of which image, and which text replica gets the result. Pure numbers.

Images are independent, so replicas get whole images, balanced by patches (longest first to the least loaded);
inside a replica, the ranks that share a sequence get consecutive windows, as even as window borders allow.
A rank without work gets no pieces; the worker gives it a dummy window, since it must stay in the collectives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True)
class ImageWork:
    """An image to encode: the text replica that needs it and the patches of each of its windows."""

    replica: int
    window_lengths: tuple[int, ...]

    @property
    def patches(self) -> int:
        return sum(self.window_lengths)


@dataclass(frozen=True)
class Piece:
    """Consecutive windows of one image: `image` is its index, windows `first` to `last` (exclusive)."""

    image: int
    first: int
    last: int


Pieces = tuple[Piece, ...]


def assign_images(images: Sequence[ImageWork], replicas: int) -> list[list[int]]:
    """Image indices for each vision replica, least loaded first, each list in the given order of the images."""
    loads = [0] * replicas
    assigned: list[list[int]] = [[] for _ in range(replicas)]
    for index in sorted(range(len(images)), key=lambda i: (-images[i].patches, i)):
        lightest = min(range(replicas), key=lambda r: (loads[r], r))
        loads[lightest] += images[index].patches
        assigned[lightest].append(index)
    return [sorted(indices, key=lambda i: (images[i].replica, i)) for indices in assigned]


def cut_evenly(lengths: Sequence[int], ranks: int) -> list[tuple[int, int]]:
    """Consecutive ranges of `lengths` for each rank, sums as even as the items allow, empty ranges last."""
    bounds = [0, *accumulate(lengths)]
    cuts = [0]
    for rank in range(1, ranks):
        target = bounds[-1] * rank / ranks
        cuts.append(min(range(cuts[-1], len(bounds)), key=lambda i: abs(bounds[i] - target)))
    cuts.append(len(lengths))
    ranges = [(first, last) for first, last in zip(cuts, cuts[1:]) if first < last]
    return ranges + [(len(lengths), len(lengths))] * (ranks - len(ranges))


def shard_images(images: Sequence[ImageWork], replicas: int, ranks: int) -> list[list[Pieces]]:
    """Pieces for each vision replica and each of its sequence ranks."""
    return [_cut_replica(images, indices, ranks) for indices in assign_images(images, replicas)]


def _cut_replica(images: Sequence[ImageWork], indices: Sequence[int], ranks: int) -> list[Pieces]:
    windows = [(i, w) for i in indices for w in range(len(images[i].window_lengths))]
    lengths = [images[i].window_lengths[w] for i, w in windows]
    shards = []
    for first, last in cut_evenly(lengths, ranks):
        pieces: list[Piece] = []
        for image, window in windows[first:last]:
            if pieces and pieces[-1].image == image:
                pieces[-1] = Piece(image, pieces[-1].first, window + 1)
            else:
                pieces.append(Piece(image, window, window + 1))
        shards.append(tuple(pieces))
    return shards
