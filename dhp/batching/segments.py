"""The full-attention segments of the ranks that share a sequence, from their pieces of pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dhp.models.family import ImageLayout
from dhp.parallel.attention.image_sharding import Piece, Pieces


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
