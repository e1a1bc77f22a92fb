"""Attention over many segments of one flattened sequence, on one rank or split over a ring × Ulysses mesh.

Divided segments go through Ulysses' exchange (`dhp.parallel.attention.ulysses`). With a ring around it (USP, Fang and
Zhao 2024) what it gathers is a ring rank's chunk, and `dhp.parallel.attention.ring` does the rest. Segments that lie in
one chunk whole never enter the ring.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dhp.base.geometry import TokenRange
from dhp.parallel.attention.kernels import attend_varlen
from dhp.parallel.attention.ring import Ring, ring_attention
from dhp.parallel.attention.shard_plan import ShardPlan, is_whole
from dhp.parallel.attention.ulysses import UlyssesGroup

# Keys and values of at most so many tokens of divided segments are gathered at once, not passed around: the delay of a
# message then counts for more than its size (`python -m experiments.ring_or_gather`).
GATHER_TOKENS = 512


@dataclass(frozen=True)
class SegmentPlan:
    """Which tokens attend to each other: those of a segment.

    groups: (length, count) of the segments that this rank has whole, equal lengths together. Without `bounds` each
    group is one batched kernel call.

    order: tokens in the order of the calls, those of divided segments last; None when they already lie so. inverse: the
    inverse permutation.

    causal: a token attends to itself and to what comes before it in its segment.

    rest: what the tokens of divided segments do; None where no rank has any.

    bounds: where each whole segment begins and the last ends, int32 [segments + 1], for one call over all of them.
    """

    groups: tuple[tuple[int, int], ...]
    order: Tensor | None
    inverse: Tensor | None
    causal: bool = False
    rest: Ulysses | Ring | None = None
    bounds: Tensor | None = None

    @property
    def whole(self) -> int:
        """Tokens of the segments that are here whole."""
        return sum(length * count for length, count in self.groups)


@dataclass(frozen=True)
class Ulysses:
    """Divided segments are exchanged with the Ulysses ranks, and attend as `plan` says between the two exchanges."""

    exchange: UlyssesGroup
    plan: SegmentPlan


@dataclass(frozen=True)
class MeshPosition:
    """A rank's position in the ring × Ulysses mesh, and its neighbours there."""

    ring_rank: int
    ring_group: dist.ProcessGroup
    ulysses_rank: int
    ulysses_group: dist.ProcessGroup

    @classmethod
    def of(cls, mesh: DeviceMesh) -> MeshPosition:
        """This rank's, on a mesh with the axes "ring" and "ulysses"."""
        ring, ulysses = mesh["ring"], mesh["ulysses"]
        return cls(ring.get_local_rank(), ring.get_group(), ulysses.get_local_rank(), ulysses.get_group())


def plan_segments(
    lengths: Sequence[int], device: torch.device, causal: bool = False, varlen: bool = False
) -> SegmentPlan:
    """Consecutive segments of the given lengths (tokens), all of them here. varlen: for one call over all of them."""
    return _plan([TokenRange(i, 0, length) for i, length in enumerate(lengths)], lengths, device, causal, None, varlen)


def plan_shard(
    shards: ShardPlan,
    position: MeshPosition,
    device: torch.device,
    causal: bool = False,
    gather: bool = False,
    varlen: bool = False,
) -> SegmentPlan:
    """What one rank of a mesh has to do. gather: see `dhp.parallel.attention.ring.Ring`; varlen: as in `plan_segments`.

    Segments that lie on one rank whole need no communication; those that lie in one ring rank's chunk, none but the
    exchange among its Ulysses ranks.
    """
    divided = shards.without_whole_segments()
    rest: Ulysses | Ring | None = None
    if divided.count_tokens():
        chunks = [divided.chunk(rank) for rank in range(divided.ring)]
        ringed = tuple(tuple(s for s in chunk if not is_whole(s, shards.lengths)) for chunk in chunks)
        ring = Ring(ringed, position.ring_rank, position.ring_group, causal, gather) if any(ringed) else None
        rest = ring
        if divided.ulysses > 1:
            exchange = UlyssesGroup(
                divided.rank_tokens(position.ring_rank), position.ulysses_rank, position.ulysses_group
            )
            rest = Ulysses(exchange, _plan(chunks[position.ring_rank], shards.lengths, device, causal, ring, varlen))
    return _plan(shards.shards[position.ring_rank][position.ulysses_rank], shards.lengths, device, causal, rest, varlen)


def index_tensors(plan: SegmentPlan) -> list[Tensor]:
    """The tensors of a plan, in a fixed order."""
    inner = index_tensors(plan.rest.plan) if isinstance(plan.rest, Ulysses) else []
    return [tensor for tensor in (plan.order, plan.inverse, plan.bounds) if tensor is not None] + inner


def with_tensors(plan: SegmentPlan, tensors: Iterator[Tensor]) -> SegmentPlan:
    """The plan with other tensors, in the order of `index_tensors`: the same ones on another device."""
    kept = {name: getattr(plan, name) for name in ("order", "inverse", "bounds")}
    kept = {name: None if tensor is None else next(tensors) for name, tensor in kept.items()}
    if kept["bounds"] is not None:
        kept["bounds"] = kept["bounds"].to(torch.int32)  # what the kernel wants, of integers that travelled together
    rest = plan.rest
    if isinstance(rest, Ulysses):
        rest = replace(rest, plan=with_tensors(rest.plan, tensors))
    return replace(plan, rest=rest, **kept)


def attend_segments(query: Tensor, key: Tensor, value: Tensor, plan: SegmentPlan, scale: float) -> Tensor:
    """Each token of [tokens, heads, dim] attends to its own segment; same shape back.

    Key and value may have fewer heads, each shared by as many query heads in a row (grouped-query attention).
    """
    if plan.order is not None:
        query, key, value = (states[plan.order] for states in (query, key, value))
    outputs = _attend_whole(query, key, value, plan, scale)
    if plan.rest is not None:
        begin = plan.whole
        outputs.append(_attend_rest(query[begin:], key[begin:], value[begin:], plan.rest, scale))
    output = outputs[0] if len(outputs) == 1 else torch.cat([query[:0], *outputs])  # none at all on an empty rank
    return output if plan.inverse is None else output[plan.inverse]


def _attend_whole(query: Tensor, key: Tensor, value: Tensor, plan: SegmentPlan, scale: float) -> list[Tensor]:
    """Outputs of the segments that are here whole: of all at once, or group by group."""
    if plan.bounds is not None and plan.groups:
        states = (s[: plan.whole] for s in (query, key, value))
        longest = max(length for length, _ in plan.groups)
        return [attend_varlen(*states, plan.bounds, longest, plan.causal, scale)]
    grouped = query.shape[1] != key.shape[1]
    repeated = grouped and _must_repeat(query)
    sizes = [length * count for length, count in plan.groups]
    parts = (s[: sum(sizes)].split(sizes) if sizes else () for s in (query, key, value))
    outputs = []
    for (length, count), *states in zip(plan.groups, *parts, strict=True):
        # [count, heads, length, dim]
        q, k, v = (s.reshape(count, length, *s.shape[1:]).transpose(1, 2) for s in states)
        if repeated:
            k, v = (s.repeat_interleave(q.shape[1] // s.shape[1], dim=1) for s in (k, v))
        shared = grouped and not repeated
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=plan.causal, scale=scale, enable_gqa=shared)
        outputs.append(attended.transpose(1, 2).flatten(0, 1))
    return outputs


def _must_repeat(query: Tensor) -> bool:
    """Whether key/value heads must be repeated: on GPUs only 16-bit kernels share them, others build tokens²."""
    return query.is_cuda and query.dtype.itemsize > 2


def _attend_rest(query: Tensor, key: Tensor, value: Tensor, rest: Ulysses | Ring, scale: float) -> Tensor:
    """Output of the tokens of divided segments."""
    if isinstance(rest, Ring):
        return ring_attention(query, key, value, rest, scale)
    states = rest.exchange.heads_to_rank(query, key, value)
    return rest.exchange.tokens_to_rank(attend_segments(*states, rest.plan, scale))


def _plan(
    ranges: Sequence[TokenRange],
    lengths: Sequence[int],
    device: torch.device,
    causal: bool,
    rest: Ulysses | Ring | None,
    varlen: bool = False,
) -> SegmentPlan:
    """The plan of a rank with these ranges, in the order of its rows: whole segments first, by length unless one call
    takes them all, then the tokens of divided ones."""
    starts: dict[int, list[int]] = defaultdict(list)
    divided: list[Tensor] = []
    for piece, start in zip(ranges, accumulate((piece.count for piece in ranges), initial=0)):
        if is_whole(piece, lengths):
            starts[piece.count].append(start)
        else:
            divided.append(torch.arange(start, start + piece.count))
    groups = tuple((length, len(firsts)) for length, firsts in starts.items())
    whole = [(torch.tensor(p)[:, None] + torch.arange(n)).flatten() for n, p in starts.items()]
    bounds = None
    if varlen:
        whole = [torch.cat([torch.empty(0, dtype=torch.long), *whole]).sort().values]
        ends = accumulate((piece.count for piece in ranges if is_whole(piece, lengths)), initial=0)
        bounds = torch.tensor(list(ends), dtype=torch.int32).to(device)
    order = torch.cat([torch.empty(0, dtype=torch.long), *whole, *divided])
    if bool((order[1:] > order[:-1]).all()):
        return SegmentPlan(groups, None, None, causal, rest, bounds)
    return SegmentPlan(groups, order.to(device), torch.argsort(order).to(device), causal, rest, bounds)


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
    states = (s[0].transpose(0, 1) for s in (query, key, value))  # [tokens, heads, dim]
    return attend_segments(*states, cu_seq_lens_q, scaling)[None], None


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
    """`segment_attention` for one packed row of a decoder, to which `segments` carries the plan.

    It is a keyword of the model's forward that reaches every layer as it is. No mask of tokens × tokens is built.
    """
    return segment_attention(module, query, key, value, attention_mask, scaling, segments)
