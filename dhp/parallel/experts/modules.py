"""The library's modules of experts: which there are in a model, which of them are known here, and how they multiply.

All experts of a layer are one module whose parameters have a dimension of experts in front: `gate_up_proj`
[experts, 2 × width, hidden] and `down_proj` [experts, hidden, width]. It is called with states [tokens, hidden] and,
for each token, the experts that it visits and their weights, [tokens, visits] each.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dhp.base.errors import ModelError

GATE_UP, DOWN = "gate_up_proj", "down_proj"
_ALIGNED_BYTES = 16
_MARK = "_is_expert_parallel"  # what the library's decorator of such classes sets
_KNOWN = {"has_gate": True, "is_concatenated": True, "is_transposed": False, "has_bias": False}
_KNOWN |= {"has_post_expert_norm": False}


def is_experts(module: nn.Module) -> bool:
    """Whether the module is all experts of a layer."""
    return hasattr(module, _MARK)


def experts_of(model: nn.Module) -> dict[str, nn.Module]:
    """Every module of experts by its name. Raises ModelError for one whose parameters are laid out otherwise than known
    here."""
    found = {name: module for name, module in model.named_modules() if is_experts(module)}
    for name, module in found.items():
        require_known(name, module)
    return found


def require_known(name: str, module: nn.Module) -> None:
    """Raises ModelError where the experts have other parameters, or are laid out otherwise in them, than known here."""
    parameters = sorted(own for own, _ in module.named_parameters())
    other = {key: getattr(module, key, None) for key, value in _KNOWN.items() if getattr(module, key, None) != value}
    if other or parameters != sorted((GATE_UP, DOWN)):
        others = ", ".join(f"{key}={value}" for key, value in other.items()) or "all else as known"
        raise ModelError(
            f"{name} ({type(module).__name__}) has parameters {parameters} ({others}): experts are cut here where each "
            f"has {GATE_UP} [experts, 2 × width, hidden] with the gate first and {DOWN} [experts, hidden, width], and "
            "no bias. Set text.parallelism=data with text.expert=1 and text.tensor=1"
        )


def choose_product(model: nn.Module, dtype: torch.dtype) -> None:
    """Let experts multiply in groups, a layer's in one call, where their shapes in `dtype` allow it; or one by one."""
    for module in model.modules():
        if is_experts(module):
            # The attribute behind the property: its setter asks the whole model, parts of which are not here.
            config: Any = module.config
            grouped = all(takes_groups(parameter, dtype) for parameter in module.parameters())
            config._experts_implementation_internal = "grouped_mm" if grouped else "eager"


def takes_groups(weights: Tensor, dtype: torch.dtype) -> bool:
    """Whether torch's product in groups takes weights [experts, out, in] in that format: none of 64 bits, and rows of
    whole 16 bytes on both sides."""
    sides = (weights.shape[1], weights.shape[2])
    return dtype != torch.float64 and all(side * dtype.itemsize % _ALIGNED_BYTES == 0 for side in sides)
