"""Arithmetic of a family, counted from the shapes of its weights."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from dhp.models.flops import TextWork, VisionWork
from dhp.models.generic.structure import Structure

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
