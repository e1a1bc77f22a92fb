"""Rows: what the device and its host give, whatever dhp does: launches, copies, products, attention by kernel."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import attention as registry
from torch.nn.attention import SDPBackend, sdpa_kernel

from dhp.config.rules import FLASH_ATTENTION_2
from dhp.parallel.attention.attention_kernels import attend_varlen, has_varlen
from dhp.parallel.attention.registered_flash import PACKAGES, REGISTERED
from experiments.gpu_check.kernels import LIMITS
from experiments.gpu_check.setting import NotHere, Setting, error_of, spend

LAUNCHES = 5000
# Rows, of what is multiplied and of the result, [m, k] × [k, n]: one large, the tower's, the decoder's, its head.
PRODUCTS = (
    (8192, 8192, 8192), *((19584, 1280, n) for n in (3420, 3424, 3456)), *((19584, n, 1280) for n in (3420, 3456)),
    (19584, 1280, 3840), (6096, 2048, 11008), (12192, 2048, 11008), (12192, 11008, 2048), (2048, 2048, 151936),
)  # fmt: skip
# Heads of queries and of keys, their width, segments and tokens of each, and whether they are causal.
SHAPES = {
    "tower, whole": (16, 16, 80, 4, 4896, False), "tower, windows": (16, 16, 80, 306, 64, False),
    "decoder": (16, 2, 128, 4, 1524, True), "decoder, 8k": (16, 2, 128, 1, 8192, True),
}  # fmt: skip
CUDNN = "cuDNN"


def check_launches(setting: Setting) -> dict[str, Any]:
    """Microseconds of an operation that computes next to nothing: of the host, and until the device has done it."""
    one, count = torch.zeros(8, device=setting.device), LAUNCHES if setting.cuda else 200
    for _ in range(100):
        one.add_(1)
    setting.wait()
    begin = time.perf_counter()
    for _ in range(count):
        one.add_(1)
    host = time.perf_counter() - begin
    setting.wait()
    whole = time.perf_counter() - begin
    return {"ok": True, "host_us": round(1e6 * host / count, 3), "all_us": round(1e6 * whole / count, 3)}


def check_copies(setting: Setting) -> dict[str, Any]:
    """GB/s: within the device, read and written; from and to the host's memory, locked and not."""
    nbytes = 1 << (30 if setting.cuda else 20)
    there, other = (torch.empty(nbytes, dtype=torch.uint8, device=setting.device) for _ in range(2))
    locked, plain = (torch.empty(nbytes, dtype=torch.uint8, pin_memory=setting.cuda and one) for one in (True, False))
    calls: dict[str, tuple[int, Callable[[], Any]]] = {
        "device": (2, lambda: other.copy_(there)), "to_device": (1, lambda: there.copy_(locked, non_blocking=True)),
        "to_host": (1, lambda: locked.copy_(there, non_blocking=True)), "to_pageable": (1, lambda: plain.copy_(there)),
    }  # fmt: skip
    spent = spend(setting, *(call for _, call in calls.values()), rounds=4)
    rates = zip(calls.items(), spent, strict=True)
    return {"ok": True, **{f"{name}_gb_s": _rate(times * nbytes / 1e9, one.ms) for (name, (times, _)), one in rates}}


def check_products(setting: Setting) -> dict[str, Any]:
    """TFLOP/s of products of the model's own widths, forward and of both gradients."""
    found = []
    for m, k, n in PRODUCTS if setting.cuda else ((64, 32, 36),):
        draw = lambda *shape: torch.randn(*shape, device=setting.device).to(setting.dtype)
        rows, weight, slopes = draw(m, k), draw(n, k), draw(m, n)
        pairs = ((rows, weight.t()), (slopes, weight), (slopes.t(), rows))
        spent = spend(setting, *(partial(torch.matmul, *pair) for pair in pairs))
        rates = [_rate(2e-12 * m * k * n, one.ms) for one in spent]
        found.append({"m": m, "k": k, "n": n, **dict(zip(("forward", "of_input", "of_weight"), rates, strict=True))})
    return {"ok": True, "products": found}


def check_attention(setting: Setting, kernel: str) -> dict[str, Any]:
    """TFLOP/s of attention over segments, forward and backward, and how far it is from torch's own flash attention."""
    setting.require_cuda(f"attention by {kernel}")
    if not has_varlen(torch.device(setting.device), setting.dtype):
        raise NotHere("attention over segments of all lengths in one call is not to be had here")
    _require(kernel)
    REGISTERED.restore()
    found: dict[str, Any] = {"ok": True}
    try:
        for name, shape in SHAPES.items():
            found[name.replace(", ", "_")] = one = _time_attention(setting, kernel, *shape)
            found["ok"] &= max(one["errors"]) < LIMITS[setting.dtype]
    finally:
        registry.restore_flash_attention_impl()
    return found


def _require(kernel: str) -> None:
    packages = PACKAGES | {FLASH_ATTENTION_2: "flash_attn.flash_attn_interface"}
    try:
        lacks = kernel in packages and find_spec(packages[kernel]) is None
    except ImportError:  # of the package above it
        lacks = True
    if lacks or (kernel in PACKAGES and kernel not in registry.list_flash_attention_impls()):
        raise NotHere(f"{kernel} is not installed")


def _time_attention(
    setting: Setting, kernel: str, heads: int, kv: int, dim: int, count: int, tokens: int, causal: bool
) -> dict[str, Any]:
    torch.manual_seed(0)
    draw = lambda number: torch.randn(count * tokens, number, dim, device=setting.device, dtype=setting.dtype)
    states = [draw(number).requires_grad_() for number in (heads, kv, kv)]
    slopes, bounds = draw(heads), torch.arange(0, count * tokens + 1, tokens, device=setting.device, dtype=torch.int32)
    own = partial(attend_varlen, *states, bounds, tokens, causal, dim**-0.5)
    wanted = own()
    wanted = [wanted, *torch.autograd.grad(wanted, states, slopes)]
    if kernel in PACKAGES:
        registry.activate_flash_attention_impl(kernel)
    forward = {CUDNN: partial(_by_cudnn, states, count, causal), FLASH_ATTENTION_2: partial(own, backend=kernel)}.get(
        kernel, own
    )
    output = forward()
    backward = lambda: torch.autograd.grad(output, states, slopes, retain_graph=True)
    errors = [error_of(*pair) for pair in zip((output, *backward()), wanted, strict=True)]
    ahead, back = spend(setting, forward, backward)
    registry.restore_flash_attention_impl()
    tflop = 4e-12 * heads * dim * count * tokens**2 * (0.5 if causal else 1)
    return {"forward": _rate(tflop, ahead.ms), "backward": _rate(2.5 * tflop, back.ms), "errors": errors}


def _by_cudnn(states: Sequence[Tensor], count: int, causal: bool) -> Tensor:
    """Of segments of one length."""
    query, key, value = (one.unflatten(0, (count, -1)).transpose(1, 2) for one in states)
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        found = F.scaled_dot_product_attention(
            query, key, value, is_causal=causal, enable_gqa=query.shape[1] != key.shape[1]
        )
    return found.transpose(1, 2).flatten(0, 1)


def _rate(amount: float, ms: float) -> float:
    return round(amount / ms * 1e3, 3)
