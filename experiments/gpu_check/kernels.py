"""Rows: kernels against references in float32, forward and backward, and how long they take."""

import time
from collections.abc import Sequence
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRMSNorm, Qwen2MLP, apply_rotary_pos_emb_vision

from dhp.config.rules import COMPILED
from dhp.models.tower import project_as_product
from dhp.parallel.attention.attention_kernels import Block, Dense, attend_varlen, choose_kernel, has_varlen
from dhp.parallel.kernels.replace import replace_kernels
from dhp.parallel.kernels.rotary import in_one_pass
from experiments.gpu_check.pair import join
from experiments.gpu_check.setting import NotHere, Setting, error_of, spend

LIMITS = {torch.bfloat16: 1e-2, torch.float32: 1e-5}  # bfloat16 rounds a single value by up to 4e-3
HEADS = {80: (16, 16), 128: (16, 2)}  # by head dim: queries', and keys' and values'; the tower's and the decoder's
NAMES = ("output", "query", "key", "value")


def check_block(setting: Setting, dim: int, diagonal: bool) -> dict[str, Any]:
    """What a ring calls: this device's kernel, with its log-sum-exp. Without a diagonal, fewer keys than queries."""
    queries = 4096 if setting.cuda else 96
    keys = queries if diagonal else queries * 3 // 4
    query, key, value, grad = _states(setting, dim, queries, keys)
    block, kernel, dense = Block(diagonal, dim**-0.5), choose_kernel(query), Dense()
    output, lse = kernel.forward(query, key, value, block)
    gradients = kernel.backward(grad, query, key, value, output, lse, block)
    exact = [state.float() for state in (query, key, value)]
    wanted, wanted_lse = dense.forward(*exact, block)
    wanted_gradients = dense.backward(grad.float(), *exact, wanted, wanted_lse, block)
    pairs = zip(NAMES, (output, *gradients), (wanted, *wanted_gradients), strict=True)
    errors = {name: error_of(*pair) for name, *pair in pairs} | {"lse": error_of(lse, wanted_lse)}
    forward, backward = spend(
        setting,
        lambda: kernel.forward(query, key, value, block),
        lambda: kernel.backward(grad, query, key, value, output, lse, block),
    )
    named = {"kernel": type(kernel).__name__, "queries": queries, "keys": keys}
    return _judged(setting, errors) | named | forward.told("forward") | backward.told("backward")


def check_varlen(setting: Setting, dim: int, causal: bool) -> dict[str, Any]:
    """What both parts call on whole segments: one call over segments of all lengths, by autograd."""
    setting.require_cuda("attention over segments of all lengths in one call")
    if not has_varlen(torch.device(setting.device), setting.dtype):
        return {"ok": False, "told": "the product would not use this kernel here: has_varlen is False"}
    lengths = [1524, 64, 2000, 1, 700] if causal else [64] * 40 + [48, 32, 16] * 4 + [2000]
    query, key, value, grad = _states(setting, dim, sum(lengths), sum(lengths))
    ends = torch.tensor([0, *lengths]).cumsum(0)
    bounds, scale = ends.to(torch.int32).to(setting.device), dim**-0.5
    states = [state.requires_grad_() for state in (query, key, value)]
    forward = lambda: attend_varlen(*states, bounds, max(lengths), causal, scale)
    output = forward()
    backward = lambda: torch.autograd.grad(output, states, grad, retain_graph=True)
    wanted = _dense_by_segment([*states, grad], lengths, Block(causal, scale))
    errors = {n: error_of(f, w) for n, f, w in zip(NAMES, (output, *backward()), wanted, strict=True)}
    first, second = spend(setting, forward, backward)
    return _judged(setting, errors) | {"segments": len(lengths)} | first.told("forward") | second.told("backward")


def _dense_by_segment(states: Sequence[Tensor], lengths: Sequence[int], block: Block) -> list[Tensor]:
    """Output and gradients of query, key and value; `states` have the output's gradient as the fourth."""
    dense, found = Dense(), []
    for query, key, value, grad in zip(*(s.detach().float().split(list(lengths)) for s in states), strict=True):
        output, lse = dense.forward(query, key, value, block)
        found.append((output, *dense.backward(grad, query, key, value, output, lse, block)))
    return [torch.cat(of_segments) for of_segments in zip(*found, strict=True)]


def _states(setting: Setting, dim: int, queries: int, keys: int) -> list[Tensor]:
    torch.manual_seed(0)
    heads, kv_heads = HEADS[dim]
    shapes = [(queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads)]
    return [torch.randn(*shape, dim, device=setting.device).to(setting.dtype) for shape in shapes]


def _judged(setting: Setting, errors: dict[str, float]) -> dict[str, Any]:
    limit = LIMITS[setting.dtype]
    return {"ok": all(error < limit for error in errors.values()), "limit": limit, "errors": errors}


ROWS, WIDTH, INNER = 12192, 2048, 11008  # of "8" samples in the text part
PATCHES, TOWER_HEADS, DIM = 39168, 16, 80


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
    query, key = (
        torch.randn(patches, TOWER_HEADS, DIM, device=device).to(setting.dtype).requires_grad_() for _ in range(2)
    )
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


KERNEL = (2, 14, 14)  # Qwen2.5-VL's: frames, rows, columns


def check_patches(setting: Setting) -> dict[str, Any]:
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
    product = _measure_patches(setting, rounded, wanted, as_product=True)
    try:
        convolution = _measure_patches(setting, rounded, wanted, as_product=False)
    except RuntimeError as error:
        convolution = {"error": f"{type(error).__name__}: {error}"}
    limit = LIMITS[setting.dtype]
    ok = max(product["errors"].values()) < limit
    return {"ok": ok, "limit": limit, "patches": patches, "product": product, "convolution": convolution}


def _measure_patches(
    setting: Setting, given: list[Tensor], wanted: tuple[Tensor, Tensor], as_product: bool
) -> dict[str, Any]:
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
