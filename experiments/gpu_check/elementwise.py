"""Rows: what stands between a layer's products: the compiled gate, RMS norm, rotary positions; and attention where its
kernel for all segments is missing."""

from __future__ import annotations

import time
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRMSNorm, Qwen2MLP, apply_rotary_pos_emb_vision

from dhp.config.rules import COMPILED
from dhp.parallel.kernels.replace import replace_kernels
from dhp.parallel.kernels.rotary import in_one_pass
from experiments.gpu_check.kernels import LIMITS
from experiments.gpu_check.pair import join
from experiments.gpu_check.setting import NotHere, Setting, error_of, spend

ROWS, WIDTH, INNER = 12192, 2048, 11008  # of "8" samples in the text part
PATCHES, HEADS, DIM = 39168, 16, 80
LENGTHS = (1524, 1200, 1524, 900)  # SDPA's, one behind another


def check_gate(setting: Setting) -> dict[str, Any]:
    """In a process that compiled nothing before: the seconds that a rank takes to put in the fused gate and to prove
    it, and a gated MLP's milliseconds with its own gate and with that one, taken in turns."""
    setting.require_cuda("a fused gate")
    if find_spec("triton") is None:
        raise NotHere("triton, by which torch.compile makes kernels, is not installed")
    join()
    config = SimpleNamespace(hidden_size=WIDTH, intermediate_size=INNER, hidden_act="silu")
    mlp = nn.ModuleList([Qwen2MLP(config).to(setting.device, setting.dtype)])
    plain, states = mlp[0].forward, torch.randn(ROWS, WIDTH, device=setting.device).to(setting.dtype)
    slopes, wanted = torch.randn_like(states), plain(states).double()
    begin = time.perf_counter()
    (use,) = replace_kernels(mlp, torch.device(setting.device), setting.dtype, dist.group.WORLD)
    seconds = time.perf_counter() - begin
    ways = {"own": plain, "fused": mlp[0].forward}
    error, made = error_of(ways["fused"](states), wanted), [way(states) for way in ways.values()]
    ahead = [lambda way=way: way(states) for way in ways.values()]
    weights = list(mlp.parameters())
    back = [lambda out=out: torch.autograd.grad(out, weights, slopes, retain_graph=True) for out in made]
    times: dict[str, float] = {}
    for name, forward, backward in zip(ways, spend(setting, *ahead), spend(setting, *back), strict=True):
        times |= forward.told(name) | backward.told(f"{name}_backward")
    limit = LIMITS[setting.dtype]
    found = {"ok": use.kernel == COMPILED and error < limit, "limit": limit, "kernel": use.kernel}
    return found | {"errors": {"output": error}, "proof_s": round(seconds, 3)} | times


def check_norm(setting: Setting) -> dict[str, Any]:
    """torch's fused RMS norm beside the model's own."""
    rows, width = (ROWS, WIDTH) if setting.cuda else (64, 64)
    states = torch.randn(rows, width, device=setting.device).to(setting.dtype)
    own = Qwen2_5_VLRMSNorm(width).to(setting.device, setting.dtype)
    fused = lambda: F.rms_norm(states, own.weight.shape, own.weight, own.variance_epsilon)
    limit, error = LIMITS[setting.dtype], error_of(fused(), own(states).double())
    ours, theirs = spend(setting, fused, lambda: own(states))
    return {"ok": error < limit, "limit": limit, "errors": {"output": error}} | ours.told("fused") | theirs.told("own")


def check_rotary(setting: Setting) -> dict[str, Any]:
    """The tower's rotary positions in one pass, compiled where triton is there and written out, beside the library's
    own code: forward and backward, and the bytes that they must move."""
    patches, device = PATCHES if setting.cuda else 64, torch.device(setting.device)
    query, key = (torch.randn(patches, HEADS, DIM, device=device).to(setting.dtype).requires_grad_() for _ in range(2))
    cos, sin = (torch.randn(patches, DIM, device=device) for _ in range(2))
    ways: dict[str, Any] = {"own": apply_rotary_pos_emb_vision}
    for name, compiled in (("compiled", True), ("written", False)):
        if not compiled or (setting.cuda and find_spec("triton")):
            ways[name] = in_one_pass(apply_rotary_pos_emb_vision, device, setting.dtype, compiled)
    lacking = [name for name, way in ways.items() if way is None]
    if lacking:
        return {"ok": False, "not_proved": lacking}
    outputs = {name: way(query, key, cos, sin) for name, way in ways.items()}
    slopes = [torch.randn(query.shape, device=device).to(setting.dtype) for _ in range(2)]
    ahead = [lambda way=way: way(query, key, cos, sin) for way in ways.values()]
    back = [
        lambda made=made: torch.autograd.grad(made, (query, key), slopes, retain_graph=True)
        for made in outputs.values()
    ]
    spent = zip(ways, spend(setting, *ahead), spend(setting, *back), strict=True)
    errors = {name: error_of(made[0], outputs["own"][0].double()) for name, made in outputs.items() if name != "own"}
    limit, found = LIMITS[setting.dtype], {}
    for name, forward, backward in spent:
        found |= forward.told(f"{name}_forward") | backward.told(f"{name}_backward")
    told = {"patches": patches, "least_bytes": 4 * query.nbytes}  # both read and written once
    return {"ok": max(errors.values()) < limit, "limit": limit, "errors": errors} | told | found


def check_sdpa(setting: Setting) -> dict[str, Any]:
    """One segment after another: what the first call with a new length costs, and what a later one does."""
    torch.backends.cuda.enable_cudnn_sdp(False)  # as the parts do
    heads, dim = (16, 128) if setting.cuda else (4, 16)
    first, second = [], []
    for length in LENGTHS if setting.cuda else (36, 20):
        states = [torch.randn(1, heads, length, dim, device=setting.device).to(setting.dtype) for _ in range(3)]
        first.append(_attend_ms(setting, states))
        second.append(_attend_ms(setting, states))
    told = {"lengths": list(LENGTHS) if setting.cuda else [36, 20], "first_ms": first, "second_ms": second}
    return {"ok": True, **told}


def _attend_ms(setting: Setting, states: list[Tensor]) -> float:
    setting.wait()
    begin = time.perf_counter()
    F.scaled_dot_product_attention(*states, is_causal=True)
    setting.wait()
    return round((time.perf_counter() - begin) * 1e3, 4)
