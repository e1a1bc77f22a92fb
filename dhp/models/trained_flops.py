"""Which matrix products a step computes of each part, by which parameters are trained.

Forward computes all. A matrix that is trained has a gradient. States have one where something before them is trained,
in their part or in one that hands over to it. In a layer, matrices that read the same states are at the same place:
what is trained of them asks for no gradient of what they read.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dhp.config.parts import DECODER
from dhp.core.parameters import TrainingRules, is_adapter, is_inside, plain_name
from dhp.models.family import Family
from dhp.models.flops import MatmulShare, TrainedShare
from dhp.models.part import Part
from dhp.models.types import LayerParts

if TYPE_CHECKING:
    from dhp.models.shape import Parameter
    from dhp.models.types import Experts

_ENTERING, _LAYERS, _ENDING = range(3)  # regions of a part
_NORM, _INTO_ATTENTION, _OUT_OF_ATTENTION, _INTO_MLP, _REST = range(-1, 4)  # places within a layer; norms: anywhere
_FIRST = (-1.0, 0.0)  # the place of what comes before all
_READS = "lora_A"  # of an adapter's two matrices, the one that reads the input of the adapted matrix


@dataclass(frozen=True)
class _Weight:
    """A parameter. region, place: where states reach it. size: multiply-adds of each row; 0 if it is no matrix.

    reads: it multiplies the states that reach its place; else the output of its adapter's first matrix.
    """

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
