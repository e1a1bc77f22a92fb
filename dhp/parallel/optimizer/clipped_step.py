"""An optimizer step with gradients scaled on the way."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def clipped_step(optimizer: torch.optim.Optimizer, gradients: Sequence[Tensor], lr: float, coefficient: float) -> None:
    """Take one step at `lr` with `gradients`, those of the optimizer's parameters, times `coefficient`.

    A fused optimizer divides by a scale where it reads each gradient, so that they are not written once more.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
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
