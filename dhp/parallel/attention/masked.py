"""Attention under windows, chunks, blocks and soft caps, some queries at a time against the keys they can see.

No mask of tokens × tokens exists: memory grows with the tokens times the keys that one of them can see.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dhp.parallel.attention.kernels import Block, Dense
from dhp.parallel.attention.visibility import BlockRule, LayerRule, Span, sees

# Queries of one call. Under a window of w tokens each sees QUERIES / w more keys than it uses.
QUERIES = 256


@dataclass(frozen=True)
class Band:
    """Segments of one length in one layer, and what their tokens see.

    length: tokens of a segment. blocks: int64 [segments, tokens], numbers of blocks, None where none count; spans: the
    blocks by their places; block_rule: how they go with the layer's window.
    """

    length: int
    causal: bool
    layer: LayerRule
    blocks: Tensor | None = None
    spans: Sequence[Span] = ()
    block_rule: BlockRule = "bounded"

    def tiles(self) -> Iterator[tuple[range, range]]:
        """Queries, and the keys that some of them see, by their places in the segment."""
        for begin in range(0, self.length, QUERIES):
            end = min(begin + QUERIES, self.length)
            first, last = self.layer.first_key(begin), end if self.causal else self.length
            for span in self.spans:
                if span.first < end and begin < span.end:
                    last = max(last, span.end)
                    first = min(first, span.first) if self.block_rule == "free" else first
            yield range(begin, end), range(first, last)

    def sees(self, queries: range, keys: range, device: torch.device) -> Tensor:
        """See `dhp.parallel.attention.visibility.sees`."""
        return sees(queries, keys, self.layer, self.causal, device, self.blocks, self.block_rule)


def attend_band(query: Tensor, key: Tensor, value: Tensor, band: Band, scale: float) -> Tensor:
    """Each token of [segments, tokens, heads, dim] attends to what the band lets it see; same shape back.

    Key and value may have fewer heads.
    """
    if band.layer.softcap is not None:
        return _Capped.apply(query, key, value, band, scale)
    grouped = query.shape[2] != key.shape[2]
    q, k, v = (s.transpose(1, 2) for s in (query, key, value))
    if grouped and query.is_cuda:  # on GPUs no kernel with a mask shares keys
        k, v = (s.repeat_interleave(q.shape[1] // s.shape[1], dim=1) for s in (k, v))
        grouped = False
    outputs = []
    for rows, columns in band.tiles():
        seen = band.sees(rows, columns, query.device)
        k_, v_ = (s[:, :, columns.start : columns.stop] for s in (k, v))
        q_ = q[:, :, rows.start : rows.stop]
        attended = F.scaled_dot_product_attention(q_, k_, v_, attn_mask=seen, scale=scale, enable_gqa=grouped)
        outputs.append(attended.transpose(1, 2))
    return torch.cat(outputs, dim=1)


class _Capped(torch.autograd.Function):
    """Attention with scores written out, which soft caps need; backward computes them again, some queries at a time."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, band: Band, scale: float) -> Tensor:
        parts = [Dense().forward(*states, block) for _, _, *states, block in _blocks(query, key, value, band, scale)]
        output, lse = torch.cat([part for part, _ in parts], dim=1), torch.cat([part for _, part in parts], dim=2)
        ctx.save_for_backward(query, key, value, output, lse)
        ctx.band, ctx.scale = band, scale
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse = ctx.saved_tensors
        grads = [torch.zeros_like(s, dtype=lse.dtype) for s in (query, key, value)]
        for rows, columns, q, k, v, block in _blocks(query, key, value, ctx.band, ctx.scale):
            # In the exact format, because several blocks of queries add to a key's gradient.
            exact = (s.to(lse.dtype) for s in (q, k, v))
            parts = Dense().backward(grad[:, rows], *exact, output[:, rows], lse[:, :, rows], block)
            for whole, at, part in zip(grads, (rows, columns, columns), parts, strict=True):
                whole[:, at] += part
        grad_query, grad_key, grad_value = (g.to(query.dtype) for g in grads)
        return grad_query, grad_key, grad_value, None, None


def _blocks(query: Tensor, key: Tensor, value: Tensor, band: Band, scale: float) -> Iterator[tuple[Any, ...]]:
    """The tiles: of each, rows of queries, rows of keys, query, key, value, and how they see each other."""
    for queries, keys in band.tiles():
        rows, columns = slice(queries.start, queries.stop), slice(keys.start, keys.stop)
        hidden = ~band.sees(queries, keys, query.device)
        block = Block(False, scale, hidden, band.layer.softcap)
        yield rows, columns, query[:, rows], key[:, columns], value[:, columns], block
