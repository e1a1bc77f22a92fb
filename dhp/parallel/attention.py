"""Attention over many segments of one flattened sequence, on one rank or split over Ulysses ranks.

Ulysses (DeepSpeed-Ulysses, Jacobs et al. 2023, section 3): each rank holds part of the sequence with all heads;
an all-to-all turns that into the whole sequence with part of the heads, attention runs, and a second all-to-all
turns it back. Shards may be of any length: the all-to-all carries split sizes, nothing is padded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dhp.parallel.collectives import AllToAll


@dataclass(frozen=True)
class Exchange:
    """The Ulysses ranks that share one sequence: tokens on each of them, in rank order, and their group."""

    rank_tokens: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup

    @property
    def degree(self) -> int:
        return len(self.rank_tokens)

    def heads_to_rank(self, states: Tensor) -> Tensor:
        """[own tokens, n, heads, dim] → [all tokens, n, heads / degree, dim]."""
        tokens, n, heads, dim = states.shape
        by_rank = states.view(tokens, n, self.degree, heads // self.degree, dim).permute(2, 0, 1, 3, 4)
        rows = by_rank.reshape(self.degree * tokens, n, heads // self.degree, dim)
        return AllToAll.apply(rows, (tokens,) * self.degree, self.rank_tokens, self.group)

    def tokens_to_rank(self, output: Tensor) -> Tensor:
        """[all tokens, heads / degree, dim] → [own tokens, heads, dim]."""
        own = self.rank_tokens[self.rank]
        rows = AllToAll.apply(output, self.rank_tokens, (own,) * self.degree, self.group)
        return rows.view(self.degree, own, *output.shape[1:]).transpose(0, 1).flatten(1, 2)


@dataclass(frozen=True)
class SegmentPlan:
    """Which tokens attend to each other: every segment to itself; causal: only to what came before, itself included.

    groups: (length, count) of the segments, equal lengths together, so that each group is one batched kernel call.
    order: tokens sorted by group, or None when they already are. inverse: its inverse.
    exchange: set when the segments lie across Ulysses ranks.
    """

    groups: tuple[tuple[int, int], ...]
    order: Tensor | None
    inverse: Tensor | None
    exchange: Exchange | None = None
    causal: bool = False


def plan_segments(
    lengths: Sequence[int], device: torch.device, exchange: Exchange | None = None, causal: bool = False
) -> SegmentPlan:
    """Group consecutive segments of the given lengths (tokens) by length."""
    starts: dict[int, list[int]] = defaultdict(list)
    start = 0
    for length in lengths:
        starts[length].append(start)
        start += length
    groups = tuple((length, len(places)) for length, places in starts.items())
    order = torch.cat([(torch.tensor(p)[:, None] + torch.arange(n)).flatten() for n, p in starts.items()])
    if bool((order[1:] > order[:-1]).all()):
        return SegmentPlan(groups, None, None, exchange, causal)
    return SegmentPlan(groups, order.to(device), torch.argsort(order).to(device), exchange, causal)


def attend_segments(query: Tensor, key: Tensor, value: Tensor, plan: SegmentPlan, scale: float) -> Tensor:
    """Each token of [tokens, heads, dim] attends to its own segment; same shape back.

    Key and value may have fewer heads, each shared by as many query heads in a row (grouped-query attention).
    """
    grouped = query.shape[1] != key.shape[1]
    if plan.order is not None:
        query, key, value = (states[plan.order] for states in (query, key, value))
    sizes = [length * count for length, count in plan.groups]
    outputs = []
    for (length, count), *states in zip(plan.groups, *(s.split(sizes) for s in (query, key, value)), strict=True):
        q, k, v = (s.view(count, length, *s.shape[1:]).transpose(1, 2) for s in states)  # [count, heads, length, dim]
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=plan.causal, scale=scale, enable_gqa=grouped)
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return output if plan.inverse is None else output[plan.inverse]


def segment_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    cu_seq_lens_q: SegmentPlan,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: states [1, heads, tokens, dim], output [1, tokens, heads, dim].

    `cu_seq_lens_q` carries our plan through the untouched tower, in place of cumulative lengths.
    """
    plan = cu_seq_lens_q
    states = torch.stack([s[0].transpose(0, 1) for s in (query, key, value)], dim=1)  # [tokens, 3, heads, dim]
    if plan.exchange is not None:
        states = plan.exchange.heads_to_rank(states)
    output = attend_segments(*states.unbind(1), plan, scaling)
    if plan.exchange is not None:
        output = plan.exchange.tokens_to_rank(output)
    return output[None], None


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    segments: SegmentPlan,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface for one packed row; shapes as in `segment_attention`.

    `segments` is a keyword of the model's forward that reaches every layer as it is. No mask of tokens × tokens
    is built.
    """
    states = (s[0].transpose(0, 1) for s in (query, key, value))  # [tokens, heads, dim]
    return attend_segments(*states, segments, scaling)[None], None
