"""Chunks of a decoder that is cut by layers, and the layers of a group of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Chunk:
    """Consecutive decoder layers.

    layers: their indices, at least one. first: it embeds tokens and inserts the features of pictures. last: it applies
    the final norm, so that the head can follow.
    """

    layers: range
    first: bool
    last: bool


def held_layers(chunks: Sequence[Chunk]) -> tuple[int, ...]:
    """Indices of the layers that a group with these chunks holds, ascending."""
    return tuple(sorted(layer for chunk in chunks for layer in chunk.layers))


def chunks_of(ranges: Sequence[range], whole: Chunk) -> tuple[Chunk, ...]:
    """Chunks of these layers of a decoder whose one chunk would be `whole`."""
    return tuple(Chunk(own, own.start == whole.layers.start, own.stop == whole.layers.stop) for own in ranges)
