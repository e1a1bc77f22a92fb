"""Attention of one block of queries to one block of keys, with what a ring needs to put blocks together.

Forward returns the output and the log-sum-exp of the scores; backward takes both as they are over *all* blocks,
and then gives this block's exact share of the gradients (Liu et al. 2023, Ring Attention, section 3).
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

QkvGradients = tuple[Tensor, Tensor, Tensor]
AUTO = "auto"  # an attention_backend: PyTorch's own kernels


class Block(NamedTuple):
    """How queries see keys.

    diagonal: both are the same tokens under causal attention, and each query sees the keys up to its own; else each
    query sees all keys. scale: factor of the scores. hidden: [..., queries, keys], keys that a query does not see, and
    softcap: what scores are capped at (`dhp.parallel.attention.visibility.LayerRule`); `Dense` alone knows both.
    """

    diagonal: bool
    scale: float
    hidden: Tensor | None = None
    softcap: float | None = None


class Kernel(Protocol):
    """query [queries, heads, dim]; key, value [keys, kv heads, dim]; lse [heads, queries] in float32 (or float64)."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        """Output, and log-sum-exp of the scores."""

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, block: Block
    ) -> QkvGradients:
        """This block's part of the gradients of query, key and value."""


class CpuFlash:
    """PyTorch's flash attention for CPUs. Any head dim; keys may have fewer heads."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        states = (_heads_first(s) for s in (query, key, value))
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *states, 0.0, block.diagonal, scale=block.scale
        )
        return output[0].transpose(0, 1), lse[0]

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, block: Block
    ) -> QkvGradients:
        given = (_heads_first(s) for s in (grad, query, key, value, output))
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *given, lse[None].contiguous(), 0.0, block.diagonal, scale=block.scale
        )
        query_, key_, value_ = (g[0].transpose(0, 1) for g in gradients)
        return query_, key_, value_


class Dense:
    """Attention written out in float32 (float64 for float64 inputs): the reference, and what runs without a kernel.

    The only one with masks and soft caps, and the only one that takes several segments [..., tokens, heads, dim].
    """

    def forward(self, query: Tensor, key: Tensor, value: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        scores, _, _, v = self._scores(query, key, value, block)
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp()
        if block.hidden is not None:
            weights = weights.masked_fill(block.hidden, 0.0)  # a query that sees none of these keys: -inf - -inf
        return (weights @ v).transpose(-3, -2).to(query.dtype), lse

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, block: Block
    ) -> QkvGradients:
        scores, q, k, v = self._scores(query, key, value, block)
        weights = (scores - lse[..., None]).exp()
        g, o = (s.transpose(-3, -2).to(v.dtype) for s in (grad, output))
        slopes = weights * (g @ v.transpose(-2, -1) - (g * o).sum(-1, keepdim=True)) * block.scale
        if block.softcap is not None:
            # Hidden scores are -inf, and their weights 0.
            slopes = slopes * (1 - (scores.clamp(min=-block.softcap) / block.softcap).square())
        heads = key.shape[-2]
        shared = lambda s: s.unflatten(-3, (heads, -1)).sum(-3).transpose(-3, -2)  # over queries of one key head
        return (
            (slopes @ k).transpose(-3, -2).to(query.dtype),
            shared(slopes.transpose(-2, -1) @ q).to(key.dtype),
            shared(weights.transpose(-2, -1) @ g).to(value.dtype),
        )

    def _scores(self, query: Tensor, key: Tensor, value: Tensor, block: Block) -> tuple[Tensor, ...]:
        """Scores [..., heads, queries, keys], and the states with heads first in the exact format."""
        exact = torch.float64 if query.dtype == torch.float64 else torch.float32
        q, k, v = (s.transpose(-3, -2).to(exact) for s in (query, key, value))
        k, v = (s.repeat_interleave(q.shape[-3] // s.shape[-3], -3) for s in (k, v))
        scores = q @ k.transpose(-2, -1) * block.scale
        if block.softcap is not None:
            scores = (scores / block.softcap).tanh() * block.softcap
        hidden = block.hidden
        if block.diagonal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        return (scores if hidden is None else scores.masked_fill(hidden, float("-inf"))), q, k, v


class CudaFlash:
    """PyTorch's flash attention for GPUs, 16-bit formats."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor, block: Block) -> tuple[Tensor, Tensor]:
        states = (_heads_first(s) for s in (query, key, value))
        output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
            *states, 0.0, block.diagonal, False, scale=block.scale
        )
        return output[0].transpose(0, 1), lse[0]

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, block: Block
    ) -> QkvGradients:
        given = [_heads_first(s) for s in (grad, query, key, value, output)]
        none = torch.empty(0, dtype=torch.long, device=query.device)
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *given,
            lse[None].contiguous(),
            None,
            None,
            len(query),
            len(key),
            0.0,
            block.diagonal,
            none,
            none,
            scale=block.scale,
        )
        query_, key_, value_ = (g[0].transpose(0, 1) for g in gradients)
        return query_, key_, value_


def _heads_first(states: Tensor) -> Tensor:
    """[tokens, heads, dim] → [1, heads, tokens, dim]."""
    return states.transpose(0, 1)[None]
