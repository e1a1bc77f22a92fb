"""Modules of a family's layers whose outputs are worth saving when the rest is recomputed, found from their names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from dhp.models.family import LayerParts
from dhp.models.generic.structure import Structure

_EXPERTS = "experts"
_BEHIND = ("down_proj", "fc2", "w2", "linear_2")  # matrices behind the activation function


def find_vision_parts(model: nn.Module, structure: Structure) -> LayerParts:
    """The tower's layers, all of one kind. Attention in them is the library's own, and never saved."""
    path = structure.vision_layers
    if path is None:
        return LayerParts("", (), (), ())
    layers = list(model.get_submodule(path).children())
    return LayerParts(path, *_matrices(layers), ("image",) * structure.vision_depth)


def find_text_parts(model: nn.Module, structure: Structure, text: Any) -> LayerParts:
    """The decoder's layers; those of one kind attend alike, and all have experts or none."""
    layers = list(model.get_submodule(structure.layers).children())
    attention = getattr(text, "layer_types", None) or ["causal"] * len(layers)
    kinds = tuple(
        f"{kind} with experts" if any(map(_is_experts, dict(layer.named_modules()))) else kind
        for kind, layer in zip(attention, layers, strict=True)
    )
    return LayerParts(structure.layers, *_matrices(layers), kinds)


def experts_of(parts: LayerParts, model: nn.Module) -> tuple[str, ...]:
    """Paths of all modules of experts."""
    return tuple(
        f"{parts.path}.{name}" for name, _ in model.get_submodule(parts.path).named_modules() if _is_experts(name)
    )


def _matrices(layers: Sequence[nn.Module]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names inside a layer: of the matrices around attention, and of those before an activation function, with whole
    modules of experts. Each layer has some of both, or there are none."""
    found: list[tuple[list[str], list[str]]] = []
    for layer in layers:
        projections, gates = [], []
        for name, module in layer.named_modules():
            if _is_experts(name):
                gates.append(name)
            elif isinstance(module, nn.Linear) and f".{_EXPERTS}." not in f".{name}.":
                if "att" in name.partition(".")[0]:
                    projections.append(name)
                elif not name.removesuffix(".linear").endswith(_BEHIND):
                    gates.append(name)
        found.append((projections, gates))
    every = tuple(tuple(dict.fromkeys(name for names in of_kind for name in names)) for of_kind in zip(*found))
    complete = [all(of_kind) for of_kind in zip(*found)]
    projections, gates = (names if all_have else () for names, all_have in zip(every, complete, strict=True))
    return projections, gates


def _is_experts(name: str) -> bool:
    return name.rpartition(".")[2] == _EXPERTS
