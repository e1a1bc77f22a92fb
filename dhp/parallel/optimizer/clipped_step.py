"""An optimizer step that scales gradients as it reads them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Rates = float | Mapping[str, float]  # a learning rate for all parameters, or one for each group of them
NAME = "name"  # in a group of an optimizer's parameters


def set_rates(groups: Sequence[dict[str, Any]], rates: Rates) -> None:
    """Set the learning rates of an optimizer's parameter groups."""
    for group in groups:
        group["lr"] = rates[group[NAME]] if isinstance(rates, Mapping) else rates


def clipped_step(
    optimizer: torch.optim.Optimizer, gradients: Sequence[Tensor], rates: Rates, coefficient: float
) -> None:
    """Take one step at `rates` with `gradients`, those of the optimizer's parameters, times `coefficient`.

    A fused optimizer divides by a scale where it reads each gradient, so that they are not written once more.
    """
    set_rates(optimizer.param_groups, rates)
    scaled = coefficient != 1.0 and len(gradients) > 0
    if scaled and optimizer.defaults.get("fused") and gradients[0].dtype != torch.float64:  # the scale is float32
        optimizer.grad_scale = torch.full((), 1.0 / coefficient, dtype=torch.float32, device=gradients[0].device)
        try:
            optimizer.step()
        finally:
            del optimizer.grad_scale
        return
    if scaled:
        torch._foreach_mul_(list(gradients), coefficient)
    optimizer.step()
