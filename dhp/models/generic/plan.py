"""Styles that transformers' tensor-parallel plan of a decoder lacks."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from dhp.models.generic.rows import generic_name
from dhp.models.generic.structure import Structure

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
