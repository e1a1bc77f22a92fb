"""A family's layers by their names: what is worth saving, what a tensor-parallel plan lacks, arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from dhp.models.contract.rows import generic_name
from dhp.models.contract.structure import Structure
from dhp.models.flops import TextWork, VisionWork
from dhp.models.types import LayerParts

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


_STANDARD = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), "colwise"),
    **dict.fromkeys(("o_proj", "down_proj"), "rowwise"),
}
_HEAD_NORMS = ("q_norm", "k_norm")


def complete_plan(model: PreTrainedModel, structure: Structure, text: Any) -> dict[str, str] | None:
    """Styles to add: of norms of single heads, whose gradients are summed over the ranks, and all of a decoder of
    ordinary layers for which there is no plan. None where there is none and layers are of another kind.

    A norm as wide as several heads gets no style, so that cutting its heads is refused by name.
    """
    layers = f"{structure.layers}."
    given = {name for name in model.tp_plan if name.startswith(layers)}
    modules = {name: one for name, one in model.named_modules() if name.startswith(layers)}
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    added = {
        generic_name(name, layers): "replicated_with_grad_allreduce"
        for name, module in modules.items()
        if name.endswith(_HEAD_NORMS) and _width(module) == head_dim
    }
    added = {name: style for name, style in added.items() if name not in given}
    if given:
        return added
    matrices = {generic_name(name, layers) for name, module in modules.items() if isinstance(module, nn.Linear)}
    if not matrices or {name.rpartition(".")[2] for name in matrices} - _STANDARD.keys():
        return None
    return (
        {name: _STANDARD[name.rpartition(".")[2]] for name in matrices}
        | added
        | {structure.embedding: "embedding_rowwise"}
    )


def _width(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters(recurse=False))


_CHOSEN = ("num_experts_per_tok", "moe_k", "top_k_experts", "moe_topk")


def count_vision(config: Any, model: PreTrainedModel, structure: Structure) -> VisionWork:
    """The layers' matrices once a patch, all others of the tower and its projector once a token."""
    vision = getattr(config, "vision_config", None) or config
    width = next((getattr(vision, n) for n in ("hidden_size", "embed_dim") if hasattr(vision, n)), 0)
    inside = structure.vision_layers or ""
    matrices = [(name, p.numel()) for name, p in model.named_parameters() if p.ndim >= 2]
    layers = sum(size for name, size in matrices if inside and name.startswith(f"{inside}."))
    modules = dict(model.named_modules())
    entering = rest = 0
    for name, size in matrices:
        if not any(name.startswith(f"{one}.") for one in structure.vision) or name.startswith(f"{inside}."):
            continue
        owner = modules[name.rpartition(".")[0]]
        if isinstance(owner, nn.Conv2d | nn.Conv3d):
            entering += size
        elif isinstance(owner, nn.Linear):
            rest += size
    return VisionWork(entering, layers, 0, structure.vision_depth * 2 * width, rest)


def count_text(config: Any, model: PreTrainedModel, structure: Structure) -> TextWork:
    """The layers' matrices once a token, those of experts as often as a token visits one."""
    text = config.get_text_config()
    chosen = next((getattr(text, name) for name in _CHOSEN if isinstance(getattr(text, name, None), int)), 1)
    token = 0.0
    for name, parameter in model.named_parameters():
        if name.startswith(f"{structure.layers}.") and parameter.ndim >= 2:
            share = chosen / parameter.shape[0] if parameter.ndim == 3 and "expert" in name else 1
            token += share * parameter.numel()
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * structure.depth
    attending = sum("attention" in kind and "linear" not in kind for kind in kinds)
    pair = attending * 2 * text.num_attention_heads * head_dim
    return TextWork(round(token), pair, text.hidden_size * text.vocab_size)
