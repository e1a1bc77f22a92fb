"""Plans attention over segments of a row, as data."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, product
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dhp.core.batch import TokenRange
from dhp.parallel.attention.attention_kernels import AUTO
from dhp.parallel.attention.ring import Ring
from dhp.parallel.attention.shard_plan import ShardPlan, count_tokens, is_whole, whole_segments
from dhp.parallel.attention.state_ring import WHOLE, StateRing, plan_ring
from dhp.parallel.attention.ulysses import UlyssesGroup
from dhp.parallel.attention.visibility import BlockRule, KeyRange, check_blocks, find_spans

# Keys and values of at most so many tokens of divided segments are gathered at once, not passed around: the delay of a
# message then counts for more than its size (docs/developers/decisions.md).
GATHER_TOKENS = 512
CPU = torch.device("cpu")
_TENSORS = ("order", "inverse", "bounds", "blocks")


@dataclass(frozen=True)
class SegmentPlan:
    """Which tokens attend to each other: those of a segment.

    groups: (length, count) of the segments that this rank has whole, in the order of the calls; equal lengths together
    without `bounds`, where each group is one batched kernel call, and neighbours of equal length with them.

    order: tokens in the order of the calls, those of divided segments last; None when they already are. inverse: the
    inverse permutation.

    causal: a token attends to itself and to what comes before it in its segment.

    rest: what the tokens of divided segments do; None where no rank has any.

    bounds: where each whole segment begins and the last ends, int32 [segments + 1], for one call over all of them.

    blocks: int64 [tokens], in the order of the rows: tokens of a segment with the same number see each other both ways,
    as those of an image do; -1 in none. block_rule: how that goes with a layer's window
    (`dhp.parallel.attention.visibility.BlockRule`). spans: by group, places of the blocks, for the host. All three for
    causal segments alone, and without what has no effect.

    backend: whose kernels compute, as a part's attention_backend says.

    calls: how often a layer that takes each segment by itself is called at least, however few groups there are: each
    call gathers weights, together with ranks whose rows have other segments.

    row: what layers do that carry state along a row which several ranks compute together; None: this one alone."""

    groups: tuple[tuple[int, int], ...]
    order: Tensor | None
    inverse: Tensor | None
    causal: bool = False
    rest: Ulysses | Ring | None = None
    bounds: Tensor | None = None
    blocks: Tensor | None = None
    block_rule: BlockRule = "bounded"
    spans: tuple[tuple[KeyRange, ...], ...] = ()
    backend: str = AUTO
    calls: int = 0
    row: Ulysses | None = None

    @property
    def whole(self) -> int:
        """Tokens of the segments that are here whole."""
        return sum(length * count for length, count in self.groups)


@dataclass(frozen=True)
class Ulysses:
    """Tokens are exchanged with other ranks for heads, or for channels, and are in segments as `plan` says between the
    two exchanges; or with `passing`, in pieces of them, whose borders stand before each in the plan's `order`."""

    exchange: UlyssesGroup
    plan: SegmentPlan
    passing: StateRing | None = None


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

    @property
    def number(self) -> int:
        """Its number among the ranks that share a row, Ulysses innermost."""
        return self.ring_rank * dist.get_world_size(self.ulysses_group) + self.ulysses_rank


def plan_segments(
    lengths: Sequence[int],
    device: torch.device,
    causal: bool = False,
    varlen: bool = False,
    blocks: Tensor | None = None,
    block_rule: BlockRule = "bounded",
    backend: str = AUTO,
) -> SegmentPlan:
    """Consecutive segments of the given lengths (tokens), all of them here. varlen: for one call over all of them.
    backend: see `SegmentPlan`.

    blocks: int64 [tokens], on the host, and block_rule: see `SegmentPlan`. Raises ValueError where they do not fit."""
    ranges = [TokenRange(i, 0, length) for i, length in enumerate(lengths)]
    return _plan(ranges, lengths, device, causal, None, varlen, blocks, block_rule, backend)


def plan_shard(
    shards: ShardPlan,
    position: MeshPosition,
    device: torch.device,
    causal: bool = False,
    gather: bool = False,
    varlen: bool = False,
    blocks: Tensor | None = None,
    block_rule: BlockRule = "bounded",
    backend: str = AUTO,
) -> SegmentPlan:
    """The plan of one rank of a mesh. gather: see `dhp.parallel.attention.ring.Ring`; varlen and backend: as in
    `plan_segments`, and so are blocks, which are those of all ranks' tokens, segments one behind another.

    Segments that one rank has whole need no communication; those that one ring rank's chunk has, none but the
    exchange among its Ulysses ranks. Raises ValueError, on all ranks alike, for blocks and a segment in the ring."""
    own = shards.shards[position.ring_rank][position.ulysses_rank]
    divided = shards.without_whole_segments()
    rest: Ulysses | Ring | None = None
    if divided.count_tokens():
        chunks = [divided.chunk(rank) for rank in range(divided.ring)]
        ringed = tuple(tuple(s for s in chunk if not is_whole(s, shards.lengths)) for chunk in chunks)
        of_ring = (position.ring_rank, position.ring_group, causal, gather, backend)
        ring = Ring(ringed, *of_ring) if any(ringed) else None
        if ring is not None and blocks is not None:
            raise ValueError(
                f"blocks of {len(blocks)} tokens, and segments divided over ring={divided.ring} ranks: the ring has no "
                "blocks. Use ulysses ranks alone, or give each rank whole segments"
            )
        rest = ring
        if divided.ulysses > 1:
            exchange = UlyssesGroup(
                divided.rank_tokens(position.ring_rank), position.ulysses_rank, position.ulysses_group
            )
            chunk = chunks[position.ring_rank]
            there = None if blocks is None else blocks[shards.rows_of(chunk)]
            inner = _plan(chunk, shards.lengths, device, causal, ring, varlen, there, block_rule, backend)
            rest = Ulysses(exchange, inner)
    here = None if blocks is None else blocks[shards.rows_of(own)]
    return _plan(own, shards.lengths, device, causal, rest, varlen, here, block_rule, backend)


@dataclass(frozen=True)
class RowRanks:
    """The ranks that compute a row together in layers that carry state along it: those that share its tokens, and of
    each of these `tensor` neighbours that have the same ones. rank: this one's number among all of them. group: None
    for one rank alone.

    passing: where these are too many for the layers' heads, the group among which state is passed on, the ranks of a
    ring or all; `group` is then that of one ring rank, or None. border: as in `StateRing`."""

    group: dist.ProcessGroup | None
    rank: int
    tensor: int = 1
    passing: PassingRanks | None = None
    border: int = 0


class PassingRanks(NamedTuple):
    """Ranks with a chunk of a row each; rank: this one's number among them."""

    group: dist.ProcessGroup | None
    rank: int
    count: int


def plan_row(shards: ShardPlan, ranks: RowRanks, device: torch.device, multiple: int = 1) -> Ulysses:
    """The exchange of a row over all of `ranks`, neighbours with equal parts of their tokens, which zeros fill up; and
    its segments, one more of these zeros.

    Segments whose tokens fill as many times `multiple` are one group, each with copies of its last token behind it, so
    that fewer calls take them: what comes after a token changes nothing of it. `order` takes tokens of the first rank,
    then of the next; `inverse` takes outputs, without those of copies."""
    if ranks.passing is not None:
        return _plan_pieces(shards, ranks, ranks.passing, device, multiple)
    places, tokens, total = list[int](), list[int](), sum(shards.lengths)
    filled = total
    for at in product(range(shards.ring), range(shards.ulysses)):
        own = shards.positions(*at)
        part = -(-len(own) // ranks.tensor)
        missing = part * ranks.tensor - len(own)
        places += [*own, *range(filled, filled + missing)]
        tokens += [part] * ranks.tensor
        filled += missing
    lengths = (*shards.lengths, filled - total) if filled > total else shards.lengths
    by_length = defaultdict[int, list[int]](list)
    for number, length in enumerate(lengths):
        by_length[-(-length // multiple) * multiple].append(number)
    groups = tuple((length, len(of_group)) for length, of_group in by_length.items())
    rows, copies = _rows_of(lengths, by_length.items())
    order = torch.argsort(torch.tensor(places, dtype=torch.long))[rows]
    inverse = _inverse(order, copies)
    plan = SegmentPlan(groups, order.to(device), inverse.to(device), causal=True)
    return Ulysses(UlyssesGroup(tuple(tokens), ranks.rank, ranks.group), plan)


def _plan_pieces(
    shards: ShardPlan, ranks: RowRanks, passing: PassingRanks, device: torch.device, multiple: int
) -> Ulysses:
    """The same where state is passed on: the exchange is among the ranks that have a chunk together, if any."""
    if passing.count == shards.ring:
        chunks, tokens = [shards.chunk(rank) for rank in range(shards.ring)], shards.rank_tokens(passing.rank)
    else:
        chunks = [shard for of_ring in shards.shards for shard in of_ring]
        tokens = (count_tokens(chunks[passing.rank]),)
    ring, calls, borders = plan_ring(chunks, shards.lengths, passing.rank, passing.group, ranks.border, multiple)
    groups = tuple((length, len(numbers)) for length, numbers in zip(calls.tokens, calls.numbers))
    rows, copies = _rows_of([piece.count for piece in chunks[passing.rank]], zip(calls.tokens, calls.numbers))
    order = [_numbers([])]
    for kind, numbers, part in zip(
        calls.kinds, calls.numbers, rows.split([length * count for length, count in groups])
    ):
        before = _numbers([borders[number] for number in numbers if kind != WHOLE]).view(len(numbers), -1)
        order.append(torch.cat([before, part.view(len(numbers), -1)], dim=1).flatten())
    plan = SegmentPlan(groups, torch.cat(order).to(device), _inverse(rows, copies).to(device), causal=True)
    return Ulysses(UlyssesGroup(tokens, ranks.rank, ranks.group), plan, replace(ring, sent=ring.sent.to(device)))


def _rows_of(lengths: Sequence[int], groups: Iterable[tuple[int, Sequence[int]]]) -> tuple[Tensor, Tensor]:
    """The tokens of all groups as places in the row, and which of them are copies. groups: tokens of each segment, with
    copies of its last one behind it, and the numbers of the segments."""
    starts = list(accumulate(lengths, initial=0))
    rows, copies = [_numbers([])], [_numbers([]).bool()]
    for longest, numbers in groups:
        last = _numbers([lengths[number] - 1 for number in numbers])[:, None]
        first = _numbers([starts[number] for number in numbers])[:, None]
        rows.append((first + torch.arange(longest).minimum(last)).flatten())
        copies.append((torch.arange(longest) > last).flatten())
    return torch.cat(rows), torch.cat(copies)


def _inverse(order: Tensor, copies: Tensor) -> Tensor:
    """Where in `order` each token is that is no copy."""
    inverse = torch.empty(len(order) - int(copies.sum()), dtype=torch.long)
    inverse[order[~copies]] = (~copies).nonzero()[:, 0]
    return inverse


def _numbers(values: Sequence[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.long)


def index_tensors(plan: SegmentPlan) -> list[Tensor]:
    """The tensors of a plan, in a fixed order."""
    found = [tensor for name in _TENSORS if (tensor := getattr(plan, name)) is not None]
    for part in (plan.rest, plan.row):
        if isinstance(part, Ulysses):
            found += index_tensors(part.plan) + ([part.passing.sent] if part.passing else [])
    return found


def with_tensors(plan: SegmentPlan, tensors: Iterator[Tensor]) -> SegmentPlan:
    """The plan with other tensors, in the order of `index_tensors`: the same ones on another device."""
    kept = {name: getattr(plan, name) for name in _TENSORS}
    kept = {name: None if tensor is None else next(tensors) for name, tensor in kept.items()}
    if kept["bounds"] is not None:
        kept["bounds"] = kept["bounds"].to(torch.int32)  # what the kernel wants, of integers that travelled together
    parts = []
    for part in (plan.rest, plan.row):
        if isinstance(part, Ulysses):
            part = replace(part, plan=with_tensors(part.plan, tensors))
            part = part if part.passing is None else replace(part, passing=replace(part.passing, sent=next(tensors)))
        parts.append(part)
    return replace(plan, rest=parts[0], row=parts[1], **kept)


def _plan(
    ranges: Sequence[TokenRange],
    lengths: Sequence[int],
    device: torch.device,
    causal: bool,
    rest: Ulysses | Ring | None,
    varlen: bool,
    blocks: Tensor | None,
    block_rule: BlockRule,
    backend: str,
) -> SegmentPlan:
    """The plan of a rank with these ranges, in the order of its rows: whole segments first, by length unless one call
    takes them all, then the tokens of divided ones."""
    whole = whole_segments(ranges, lengths, in_order=varlen)
    starts_of_rows = accumulate((piece.count for piece in ranges), initial=0)
    divided = [
        torch.arange(start, start + piece.count)
        for piece, start in zip(ranges, starts_of_rows)
        if not is_whole(piece, lengths)
    ]
    rows = [(torch.tensor(starts)[:, None] + torch.arange(length)).flatten() for length, starts in whole]
    groups = tuple((length, len(starts)) for length, starts in whole)
    bounds = None
    if varlen:
        ends = accumulate((length for length, starts in whole for _ in starts), initial=0)
        bounds = torch.tensor(list(ends), dtype=torch.int32).to(device)
    order = torch.cat([torch.empty(0, dtype=torch.long), *rows, *divided])
    plan = SegmentPlan(groups, None, None, causal, rest, bounds, backend=backend)
    if not bool((order[1:] > order[:-1]).all()):
        plan = replace(plan, order=order.to(device), inverse=torch.argsort(order).to(device))
    if blocks is None:
        return plan
    check_blocks(blocks, block_rule, len(order), causal)
    spans = find_spans(whole, blocks)
    return replace(plan, blocks=blocks.to(device), block_rule=block_rule, spans=spans) if any(spans) else plan
