"""Attention under every rule of visibility written out: one mask of tokens × tokens, the reference of the tests."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from dhp.parallel.attention.visibility import LayerRule


def dense_mask(lengths: Sequence[int], layer: LayerRule, blocks: Sequence[int] | None = None, rule: str = "") -> Tensor:
    """Whether token i sees token j, [tokens, tokens], one comparison at a time."""
    segments = [number for number, length in enumerate(lengths) for _ in range(length)]
    starts = [0, *accumulate(lengths)]
    total = len(segments)
    numbers = [-1] * total if blocks is None else list(blocks)
    seen = torch.zeros(total, total, dtype=torch.bool)
    for i in range(total):
        begin = starts[segments[i]]
        for j in range(begin, starts[segments[i] + 1]):
            causal, block = j <= i, numbers[i] == numbers[j] and numbers[i] >= 0
            near = layer.window is None or j > i - layer.window
            near = near and (layer.chunk is None or (i - begin) // layer.chunk == (j - begin) // layer.chunk)
            if rule == "windowed" and layer.window is None and layer.chunk is None:
                block = False
            seen[i, j] = (near and causal) or block if rule == "free" else near and (causal or block)
    return seen


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float, cap: float | None = None
) -> Tensor:
    """[tokens, heads, dim] of each, keys maybe with fewer heads, values maybe of another width."""
    q, k, v = (s.transpose(0, 1) for s in (query, key, value))
    k, v = (s.repeat_interleave(len(q) // len(s), 0) for s in (k, v))
    scores = q @ k.transpose(1, 2) * scale
    if cap is not None:
        scores = (scores / cap).tanh() * cap
    return (scores.masked_fill(~seen, float("-inf")).softmax(-1) @ v).transpose(0, 1)


def random_states(tokens: int, heads: int, kv_heads: int, dim: int, value_dim: int) -> list[Tensor]:
    """Query, key, value, and the gradient of the output, in float64."""
    generator = torch.Generator().manual_seed(tokens)
    shapes = ((heads, dim), (kv_heads, dim), (kv_heads, value_dim), (heads, value_dim))
    return [torch.randn(tokens, *shape, dtype=torch.float64, generator=generator) for shape in shapes]
