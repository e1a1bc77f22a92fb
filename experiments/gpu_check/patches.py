"""Row: the patch embedding as a matrix product, as dhp computes it, beside the library's convolution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dhp.models.patches import project_as_product
from experiments.gpu_check.kernels import LIMITS
from experiments.gpu_check.setting import Setting, error_of, spend

KERNEL = (2, 14, 14)  # Qwen2.5-VL's: frames, rows, columns


def check(setting: Setting) -> dict[str, Any]:
    """Errors of output and weight gradient against the product in float32. What the convolution raises is told."""
    torch.backends.cudnn.allow_tf32 = False
    patches, width = (4896, 1280) if setting.cuda else (64, 32)
    torch.manual_seed(0)
    pixels = torch.randn(patches, 3, *KERNEL, device=setting.device)
    weight = 0.02 * torch.randn(width, 3, *KERNEL, device=setting.device)
    grad = torch.randn(patches, width, device=setting.device)
    rounded = [tensor.to(setting.dtype) for tensor in (pixels, weight, grad)]
    flat = [tensor.float().flatten(1) for tensor in rounded]
    wanted = (flat[0] @ flat[1].T, flat[2].T @ flat[0])
    product = _measure(setting, rounded, wanted, as_product=True)
    try:
        convolution = _measure(setting, rounded, wanted, as_product=False)
    except RuntimeError as error:
        convolution = {"error": f"{type(error).__name__}: {error}"}
    limit = LIMITS[setting.dtype]
    ok = max(product["errors"].values()) < limit
    return {"ok": ok, "limit": limit, "patches": patches, "product": product, "convolution": convolution}


def _measure(setting: Setting, given: list[Tensor], wanted: tuple[Tensor, Tensor], as_product: bool) -> dict[str, Any]:
    pixels, weight, grad = given
    module = nn.Conv3d(3, len(weight), KERNEL, stride=KERNEL, bias=False, device=setting.device, dtype=setting.dtype)
    module.weight.data.copy_(weight)
    if as_product:
        project_as_product(module)
    forward = lambda: module(pixels).flatten(1)
    output = forward()
    backward = lambda: torch.autograd.grad(output, module.weight, grad, retain_graph=True)[0]
    errors = {"output": error_of(output, wanted[0]), "weight": error_of(backward().flatten(1), wanted[1])}
    first, second = spend(setting, forward, backward)
    return {"errors": errors} | first.told("forward") | second.told("backward")
