"""The shape of a model without its weights: its parameters, those that a rank holds, and sizes of a decoder's pieces.

They are counted by `dhp.models.empty`, which brings modeling code along; these values bring nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dhp.core.parameters import ADAFACTOR, ADAMW, MUON, PERSISTENT_ELEMENTS
from dhp.core.state_forms import MOMENTS
from dhp.models.types import Chunk, held_layers


@dataclass(frozen=True)
class PartShape:
    """Parameters of a part or of one of its stages.

    total: all of them. per_rank: what the fullest tensor rank holds. replicated: those that each rank holds whole.

    trained: of per_rank, those that are trained; None: all of them. quantized: of per_rank, those kept in four bits.

    states: numbers that the optimizer keeps of each one that is trained, on average. factors: further ones, which every
    rank has whole, in all.

    orthogonalizing: operations of a step in which Muon makes momenta of per_rank's matrices orthogonal.

    small: of per_rank, those in parameters that ZeRO's stage 3 does not cut.
    """

    total: int
    per_rank: int
    replicated: int
    trained: int | None = None
    quantized: int = 0
    states: float = len(MOMENTS)
    factors: int = 0
    orthogonalizing: float = 0.0
    small: int = 0


@dataclass(frozen=True)
class HeldParameter:
    """One parameter of a part, as the fullest tensor rank holds it. names: all of a weight that modules share.

    total: numbers that it has; own: of these, on the rank; split: other ranks hold the rest. trains: it is trained.
    quantized: it is kept in four bits.

    shape: of the whole. matrix: it is one of a hidden layer (`dhp.models.hidden_matrices`).
    """

    names: tuple[str, ...]
    total: int
    own: int
    split: bool
    trains: bool
    quantized: bool
    shape: tuple[int, ...] = ()
    matrix: bool = False


def sum_shape(parameters: Iterable[HeldParameter], selects: bool, optimizer: str = ADAMW) -> PartShape:
    """Of these parameters together. selects: not all of the run's are trained."""
    total = per_rank = replicated = trained = quantized = states = factors = small = 0
    operations = 0.0
    for one in parameters:
        total += one.total
        per_rank += one.own
        replicated += 0 if one.split else one.total
        trained += one.own * one.trains
        small += one.own * (one.own <= PERSISTENT_ELEMENTS)
        quantized += one.total * one.quantized
        each, whole = states_of(optimizer, one.shape, one.matrix)
        states += one.own * one.trains * each
        factors += whole * one.trains
        if optimizer == MUON and one.matrix and one.trains:
            operations += _orthogonalizing(one.shape) * one.own / one.total
    average = states / trained if trained else float(len(MOMENTS))
    chosen = trained if selects else None
    return PartShape(total, per_rank, replicated, chosen, quantized, average, factors, operations, small)


def _orthogonalizing(shape: Sequence[int]) -> float:
    """Operations of Newton and Schulz's five iterations on a matrix: three products each, X Xᵀ, its square, and that
    times X."""
    least, most = sorted(shape)
    return 5.0 * (4 * least**2 * most + 2 * least**3)


def states_of(optimizer: str, shape: Sequence[int], matrix: bool) -> tuple[int, int]:
    """Numbers that an optimizer keeps of each of a parameter's, and of the whole besides. matrix: of a hidden layer."""
    if optimizer == ADAFACTOR:
        return (0, math.prod(shape[:-1]) + math.prod(shape[:-2]) * shape[-1]) if len(shape) > 1 else (1, 0)
    return (1 if optimizer == MUON and matrix else len(MOMENTS)), 0


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
