"""Rows: attention kernels against the dense reference in float32, forward and backward, and how long they take."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dhp.parallel.attention.attention_kernels import Block, Dense, attend_varlen, choose_kernel, has_varlen
from experiments.gpu_check.setting import Setting, error_of, spend

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
    """Query, key, value, and a gradient of the output."""
    torch.manual_seed(0)
    heads, kv_heads = HEADS[dim]
    shapes = [(queries, heads), (keys, kv_heads), (keys, kv_heads), (queries, heads)]
    return [torch.randn(*shape, dim, device=setting.device).to(setting.dtype) for shape in shapes]


def _judged(setting: Setting, errors: dict[str, float]) -> dict[str, Any]:
    limit = LIMITS[setting.dtype]
    return {"ok": all(error < limit for error in errors.values()), "limit": limit, "errors": errors}
