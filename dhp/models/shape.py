"""The shape of a model without its weights: its parameters, those that a rank holds, and sizes of a decoder's pieces.

They are counted by `dhp.models.empty`, which brings modeling code along; these values bring nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dhp.models.types import Chunk, held_layers


@dataclass(frozen=True)
class PartShape:
    """Parameters of a part or of one of its stages.

    total: all of them. per_rank: what the fullest tensor rank holds. replicated: those that each rank holds whole.

    trained: of per_rank, those that are trained; None: all of them. quantized: of per_rank, those kept in four bits.
    """

    total: int
    per_rank: int
    replicated: int
    trained: int | None = None
    quantized: int = 0


@dataclass(frozen=True)
class HeldParameter:
    """One parameter of a part, as the fullest tensor rank holds it. names: all of a weight that modules share.

    total: numbers that it has; own: of these, on the rank; split: other ranks hold the rest. trains: it is trained.
    quantized: it is kept in four bits.
    """

    names: tuple[str, ...]
    total: int
    own: int
    split: bool
    trains: bool
    quantized: bool


def sum_shape(parameters: Iterable[HeldParameter], selects: bool) -> PartShape:
    """Of these parameters together. selects: not all of the run's are trained."""
    total = per_rank = replicated = trained = quantized = 0
    for one in parameters:
        total += one.total
        per_rank += one.own
        replicated += 0 if one.split else one.total
        trained += one.own * one.trains
        quantized += one.total * one.quantized
    return PartShape(total, per_rank, replicated, trained if selects else None, quantized)


@dataclass(frozen=True)
class Parameter:
    """One parameter of a model. also: its other names, of a weight that several modules share.

    part: the run's part that holds it. used: an output depends on it, and a part of the run may train it.
    """

    name: str
    also: tuple[str, ...]
    shape: tuple[int, ...]
    part: str
    used: bool

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class DecoderSizes:
    """Parameters of a decoder's pieces.

    layers: of each. head: of the head, which has them for itself unless `tied`. Then they are the embedding's, and
    `head == embedding`: they exist once where one group of ranks holds the first chunk and the last, else both groups
    have them.
    """

    embedding: int
    layers: tuple[int, ...]
    norm: int
    head: int
    tied: bool

    def held(self, chunks: Sequence[Chunk]) -> int:
        """Parameters of a group that holds these chunks."""
        first, last = any(chunk.first for chunk in chunks), any(chunk.last for chunk in chunks)
        ends = self.embedding * first + (self.norm + self.head) * last
        twice = self.head if self.tied and first and last else 0
        return ends - twice + sum(self.layers[layer] for layer in held_layers(chunks))
