"""A model's shape without weights: parameters, matrices, products."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dhp.config.parts import DECODER
from dhp.core.parameters import (
    ADAFACTOR,
    ADAMW,
    MOMENTS,
    MUON,
    PERSISTENT_ELEMENTS,
    TrainingRules,
    is_adapter,
    is_inside,
    plain_name,
)
from dhp.models.family import Family
from dhp.models.flops import MatmulShare, TrainedShare
from dhp.models.types import Chunk, LayerParts, Part, held_layers

if TYPE_CHECKING:
    from dhp.models.types import Experts


@dataclass(frozen=True)
class PartShape:
    """Parameters of a part or of one of its stages.

    total: all of them. per_rank: what the fullest tensor rank holds. replicated: those that each rank holds whole.

    trained: of per_rank, those that are trained; None: all of them. quantized: of per_rank, those kept in four bits.

    states: numbers that the optimizer keeps of each one that is trained, on average. factors: further ones, which every
    rank has whole, in all.

    orthogonalizing: operations of a step in which Muon makes momenta of per_rank's matrices orthogonal.

    small: of per_rank, those in parameters that ZeRO's stage 3 does not cut.

    experts: of per_rank, those of experts that replicas share out, which fewer ranks hold alike than all else;
    trained_experts: of these, those that are trained."""

    total: int
    per_rank: int
    replicated: int
    trained: int | None = None
    quantized: int = 0
    states: float = len(MOMENTS)
    factors: int = 0
    orthogonalizing: float = 0.0
    small: int = 0
    experts: int = 0
    trained_experts: int = 0


@dataclass(frozen=True)
class HeldParameter:
    """One parameter of a part, as the fullest tensor rank holds it. names: all of a weight that modules share.

    total: numbers that it has; own: of these, on the rank; split: other ranks hold the rest. trains: it is trained.
    quantized: it is kept in four bits.

    shape: of the whole. matrix: it is one of a hidden layer (`dhp.models.shape`). shared_out: experts, by replicas."""

    names: tuple[str, ...]
    total: int
    own: int
    split: bool
    trains: bool
    quantized: bool
    shape: tuple[int, ...] = ()
    matrix: bool = False
    shared_out: bool = False


def sum_shape(parameters: Iterable[HeldParameter], selects: bool, optimizer: str = ADAMW) -> PartShape:
    """Of these parameters together. selects: not all of the run's are trained."""
    total = per_rank = replicated = trained = quantized = states = factors = small = experts = trained_experts = 0
    operations = 0.0
    for one in parameters:
        total += one.total
        per_rank += one.own
        replicated += 0 if one.split else one.total
        trained += one.own * one.trains
        small += one.own * (one.own <= PERSISTENT_ELEMENTS)
        quantized += one.total * one.quantized
        experts += one.own * one.shared_out
        trained_experts += one.own * one.shared_out * one.trains
        each, whole = states_of(optimizer, one.shape, one.matrix)
        states += one.own * one.trains * each
        factors += whole * one.trains
        if optimizer == MUON and one.matrix and one.trains:
            operations += _orthogonalizing(one.shape) * one.own / one.total
    average = states / trained if trained else float(len(MOMENTS))
    chosen = trained if selects else None
    more = (average, factors, operations, small, experts, trained_experts)
    return PartShape(total, per_rank, replicated, chosen, quantized, *more)


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

    part: the run's part that holds it. used: an output depends on it, and a part of the run may train it."""

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
    have them."""

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


_WEIGHT = "weight"  # at the end of a matrix's name: Gemma 3's projection has it behind an underscore
_EMBEDS = "embed"  # in the name of what embeds tokens, patches or positions


def hidden_matrices(shapes: Mapping[str, Sequence[int]], family: Family) -> frozenset[str]:
    """Names of the matrices among parameters of these shapes: weights with two axes of a part's layers, and outside of
    them of all that neither embeds nor is the head. A stack of experts' matrices has three axes."""
    paths = [part.layers.path for part in family.parts.values()]
    matrices = (name for name, shape in shapes.items() if len(shape) == 2 and name.endswith(_WEIGHT))
    return frozenset(name for name in matrices if is_inside(name, paths) or not _is_end(name, family))


def _is_end(name: str, family: Family) -> bool:
    return _EMBEDS in name or is_inside(name, (family.decoder.embedding, family.decoder.head))


_ENTERING, _LAYERS, _ENDING = range(3)  # regions of a part
_NORM, _INTO_ATTENTION, _OUT_OF_ATTENTION, _INTO_MLP, _REST = range(-1, 4)  # places within a layer; norms: anywhere
_FIRST = (-1.0, 0.0)  # the place of what comes before all
_READS = "lora_A"  # of an adapter's two matrices, the one that reads the input of the adapted matrix


@dataclass(frozen=True)
class _Weight:
    """A parameter. region, place: where states reach it. size: multiply-adds of each row; 0 if it is no matrix.

    reads: it multiplies the states that reach its place; else the output of its adapter's first matrix."""

    region: int
    place: tuple[int, int]
    size: float
    trained: bool
    adapter: bool
    reads: bool


def find_passes(family: Family, parameters: Iterable[Parameter], rules: TrainingRules) -> dict[str, TrainedShare]:
    """The trained share of each part. family: with the parts of the run; parameters: all of its model's."""
    used = [one for one in parameters if one.used]
    handed = any(rules.trains(one.name) for one in used if one.part != DECODER)
    found = {}
    for name, part in family.parts.items():
        own = [one for one in used if one.part == name]
        experts = family.decoder.experts if name == DECODER else None
        found[name] = _passes(list(_weights(own, part, experts, rules)), handed and name == DECODER)
    return found


def _passes(weights: Sequence[_Weight], before: bool) -> TrainedShare:
    """before: whether what enters the part has a gradient."""
    products, attention = [], 0.0
    for region in (_ENTERING, _LAYERS, _ENDING):
        own = [weight for weight in weights if weight.region == region]
        trained = [weight.place for weight in own if weight.trained]
        first = _FIRST if before else min(trained, default=(math.inf, 0.0))
        products.append(_products(own, first))
        if region == _LAYERS:
            layers = {weight.place[0] for weight in own}
            attention = sum(first <= (layer, _INTO_ATTENTION) for layer in layers) / max(len(layers), 1)
        before = before or bool(trained)
    return TrainedShare(*products, attention)


def _products(weights: Sequence[_Weight], first: tuple[float, float]) -> MatmulShare:
    """first: the first place that trains anything; states behind it have gradients."""
    whole = sum(weight.size for weight in weights if not weight.adapter)
    if not whole:
        return MatmulShare()
    inputs = sum(weight.size for weight in weights if weight.place > first or not weight.reads)
    trained = sum(weight.size for weight in weights if weight.trained)
    return MatmulShare(sum(weight.size for weight in weights) / whole, inputs / whole, trained / whole)


def _weights(own: Sequence[Parameter], part: Part, experts: Experts | None, rules: TrainingRules) -> Iterator[_Weight]:
    """own: the part's, in the model's order."""
    matrices = {_module(one.name) for one in own if len(one.shape) > 1}
    head = getattr(part, "head", None)
    behind = (*part.projector, *([head] if head else []))
    numbers: dict[str, int] = {}  # of modules outside of the layers, in that order
    passed = False
    for one in own:
        module, adapter = _module(one.name), is_adapter(one.name)
        about = (_size(one, experts), rules.trains(one.name), adapter, not adapter or _READS in one.name)
        if is_inside(one.name, [part.layers.path]):
            number, _, inside = module.removeprefix(f"{part.layers.path}.").partition(".")
            passed = True
            yield _Weight(_LAYERS, (int(number), _place(inside, module in matrices, part.layers)), *about)
            continue
        place = (0, numbers.setdefault(module, len(numbers)))
        leads_out = any(is_inside(name, behind) for name in (one.name, *one.also))
        if not (passed or is_inside(one.name, behind)):
            yield _Weight(_ENTERING, place, *about)
        if passed or leads_out:  # an embedding that is the head too does both
            yield _Weight(_ENDING, place, *about)


def _module(name: str) -> str:
    """The module of the plain model that a parameter, or its adapter's, belongs to."""
    pieces = plain_name(name).split(".")
    adapter = next((at for at, piece in enumerate(pieces) if piece.startswith("lora_")), len(pieces) - 1)
    return ".".join(pieces[:adapter])


def _place(inside: str, matrix: bool, layers: LayerParts) -> int:
    """The place of a module inside a layer. matrix: it has one."""
    if inside in layers.projections:
        return _OUT_OF_ATTENTION if inside == layers.projections[-1] else _INTO_ATTENTION
    if is_inside(inside, layers.mlp):
        return _INTO_MLP
    if matrix:
        return _REST
    attentions = {name.rpartition(".")[0] for name in layers.projections} - {""}
    return _INTO_ATTENTION if inside.rpartition(".")[0] in attentions else _NORM


def _size(one: Parameter, experts: Experts | None) -> float:
    """Multiply-adds a row; of experts that are one matrix, for as many as a token visits."""
    if len(one.shape) < 2:
        return 0.0
    share = experts.visits / experts.count if experts and len(one.shape) == 3 else 1.0
    return one.size * share
