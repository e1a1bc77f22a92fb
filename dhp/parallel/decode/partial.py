"""A new token's attention on ranks that share its row: over each rank's own keys, and then over all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dhp.parallel.attention.kernels import AUTO, Block, Dense, choose_kernel, takes_varlen
from dhp.parallel.attention.visibility import LayerRule, layer_rule
from dhp.parallel.decode.cache import ShardedCacheIndex
from dhp.parallel.decode.merge import merge_over_ranks


@dataclass(frozen=True)
class NewToken:
    """Arguments of a layer's attention for the one new token of a row: the row's tokens on this rank, and the ranks
    that have the others; None: this one has all."""

    held: ShardedCacheIndex
    group: dist.ProcessGroup | None
    backend: str = AUTO


def new_token_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None,
    segments: NewToken,
    **named: Any,
) -> tuple[Tensor, None]:
    """Attention of a decoder's layer in transformers' terms: query [1, heads, 1, dim], key and value [1, kv heads,
    tokens here, dim], output [1, 1, heads, dim].

    Raises ModelError for what is not computed here (`dhp.parallel.attention.visibility.layer_rule`).
    """
    rule = layer_rule(module, attention_mask, named)
    # Tokens here are in the row's order, so a window or a chunk is the last ones of them: nothing is masked.
    first = segments.held.since(rule.first_key(segments.held.total))
    states = query[0].transpose(0, 1), key[0, :, first:].transpose(0, 1), value[0, :, first:].transpose(0, 1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    output, lse = attend_own(*states, scale, rule, segments.backend)
    if segments.group is not None:
        output = merge_over_ranks(output, lse, segments.group)
    return output.to(query.dtype)[None, None], None


def attend_own(
    query: Tensor, key: Tensor, value: Tensor, scale: float, rule: LayerRule, backend: str = AUTO
) -> tuple[Tensor, Tensor]:
    """Output [heads, width of value] and log-sum-exp [heads] of one query [1, heads, dim] that sees all keys [tokens,
    kv heads, dim], in float32 (float64 for float64). Without keys, 0 and -inf: kernels fail without any."""
    exact = torch.float64 if query.dtype == torch.float64 else torch.float32
    if not len(key):
        empty = query.new_zeros((query.shape[1], value.shape[-1]), dtype=exact)
        return empty, query.new_full((query.shape[1],), float("-inf"), dtype=exact)
    block = Block(False, scale, softcap=rule.softcap)
    width, wanted = value.shape[-1], max(query.shape[-1], value.shape[-1])
    query, key, value = (
        s if s.shape[-1] == wanted else F.pad(s, (0, wanted - s.shape[-1])) for s in (query, key, value)
    )
    slow = rule.softcap is not None or (query.is_cuda and not takes_varlen(query))  # no fast kernel there is so wide
    kernel = Dense() if slow else choose_kernel(query, backend)
    output, lse = kernel.forward(query, key, value, block)
    return output[0, :, :width].to(exact), lse[:, 0].to(exact)
