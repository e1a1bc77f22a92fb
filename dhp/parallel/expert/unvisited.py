"""Experts that none of a rank's tokens visit take part in its backward all the same.

Ranks sum gradients together in an order that a layout fixes, FSDP2 and DeepSpeed layer by layer; tokens of ranks that
hold some experts each meet in every layer. A rank that has no token for a module of experts, as in a row without a
picture where pictures have experts of their own (ERNIE 4.5 VL), would leave all of that out, and the others wait.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn

from dhp.parallel.expert.modules import Groups, is_experts, is_known, run_experts

OF_PICTURES = "vision_moe"  # the experts of pictures in a block that has others for text
KINDS = "moe_mm_token_type_ids"  # the argument by which such a block knows a picture's tokens


def let_all_take_part(model: nn.Module) -> None:
    """Give every parameter of experts, and of the router before them, a gradient of zero where no token comes."""
    for module in model.modules():
        if is_experts(module) and is_known(module):
            module.forward = _without_rows(module, module.forward)
        elif isinstance(getattr(module, OF_PICTURES, None), nn.Module):
            module.forward = _without_pictures(module, module.forward)


def _without_rows(experts: nn.Module, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @wraps(forward)
    def run(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        if len(hidden_states):
            return forward(hidden_states, top_k_index, top_k_weights)
        none = torch.zeros(len(next(experts.parameters())), dtype=torch.int32, device=hidden_states.device)
        output = run_experts(experts, hidden_states, Groups([0] * len(none), none))
        return output + top_k_weights.sum().to(output.dtype)

    return run


def _without_pictures(block: nn.Module, forward: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Any]:
    @wraps(forward)
    def run(hidden_states: Tensor, *given: Any, **named: Any) -> tuple[Tensor, Tensor]:
        output, logits = forward(hidden_states, *given, **named)
        kinds = given[0] if given else named.get(KINDS)
        if kinds is None or not kinds.any():
            unvisited, _ = getattr(block, OF_PICTURES)(hidden_states.flatten(0, -2)[:0])
            output = output + unvisited.sum()
        return output, logits

    return run
