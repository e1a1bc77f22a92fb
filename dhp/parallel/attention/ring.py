"""Ring attention: keys and values travel, results merge exactly.

Liu et al. 2023, "Ring Attention with Blockwise Transformers". Merging in float32 by log-sum-exp; backward with the
output and log-sum-exp of all blocks, so that no block needs another's scores. Gradients of keys and values travel with
them, in float32, from the first other rank on until they are back at their rank, whose own share is added there."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dhp.core.batch import TokenRange
from dhp.parallel.attention.attention_kernels import AUTO, Block, Dense, choose_kernel
from dhp.parallel.attention.shard_plan import Shard, count_tokens
from dhp.parallel.attention.visibility import PLAIN, QUERIES, LayerRule, sees
from dhp.parallel.comm import Shift, exchange_rows


class ChunkPair(NamedTuple):
    """Rows of queries that see rows of keys; diagonal: the same tokens, each seeing those up to itself.

    masked: the places in the segment of both, where a window or chunk hides some of these keys from some queries."""

    queries: slice
    keys: slice
    diagonal: bool
    masked: tuple[range, range] | None = None

    def block(self, scale: float, layer: LayerRule, causal: bool, device: torch.device) -> Block:
        """How these queries see these keys. causal: as in `Ring`."""
        hidden = None
        if self.masked is not None:
            hidden = ~sees(*self.masked, layer, causal, device, None, "bounded")
        return Block(self.diagonal, scale, hidden, layer.softcap)


@dataclass(frozen=True)
class Ring:
    """Ranks that pass keys and values around. chunks: the ranges of each, in rank order.

    gather: fetch all keys and values at once instead, which for short rings is one message instead of several.

    backend: whose kernels compute the blocks (`dhp.parallel.attention.attention_kernels.choose_kernel`)."""

    chunks: tuple[Shard, ...]
    rank: int
    group: dist.ProcessGroup
    causal: bool
    gather: bool = False
    backend: str = AUTO
    _pairs: dict[tuple[int, LayerRule], list[ChunkPair]] = field(default_factory=dict, repr=False, compare=False)

    @property
    def keeps(self) -> bool:
        """Whether received keys and values stay for backward, and are not sent again. With two ranks this takes
        as much memory as the own ones do; with more ranks it is done for short sequences alone."""
        return self.gather or len(self.chunks) == 2

    def tokens(self, rank: int) -> int:
        return count_tokens(self.chunks[rank])

    def pairs(self, source: int, layer: LayerRule = PLAIN) -> list[ChunkPair]:
        """Pairs of this rank's queries and keys of rank `source`. Listed once, for all layers of the same rule and
        both directions: with hundreds of segments that takes as long as a layer's kernels."""
        if (source, layer) not in self._pairs:
            pairs = visible_pairs(self.chunks[self.rank], self.chunks[source], self.causal, layer)
            self._pairs[source, layer] = list(pairs)
        return self._pairs[source, layer]

    def source(self, step: int) -> int:
        """Whose keys are here in the given step."""
        return (self.rank - step) % len(self.chunks)


def visible_pairs(queries: Shard, keys: Shard, causal: bool, layer: LayerRule = PLAIN) -> Iterator[ChunkPair]:
    """Pairs of ranges of the same segment of which the queries see the keys: whole ranges, or where a layer has a
    window or chunks, `QUERIES` queries and the keys that some of them see.

    Raises ValueError for ranges that overlap without being the same: no token is on two ranks."""
    of_segment = defaultdict(list)
    for key, columns in _with_rows(keys):
        of_segment[key.segment].append((key, columns))
    for query, rows in _with_rows(queries):
        for key, columns in of_segment.get(query.segment, ()):
            if causal and key.first >= query.end:
                continue
            same = query == key
            if not same and query.first < key.end and key.first < query.end:
                raise ValueError(f"{query} and {key} overlap; every token must lie on one rank")
            if layer.bounds:
                yield from _masked_pairs(query, rows, key, columns, layer)
            else:
                yield ChunkPair(rows, columns, causal and same)


def _masked_pairs(
    query: TokenRange, rows: slice, key: TokenRange, columns: slice, layer: LayerRule
) -> Iterator[ChunkPair]:
    """The pairs of causal queries of a range and keys of another, or of the same, some queries at a time."""
    for begin in range(query.first, query.end, QUERIES):
        end = min(begin + QUERIES, query.end)
        first, last = max(key.first, layer.first_key(begin)), min(key.end, end)
        if first >= last:
            continue
        own = slice(rows.start + begin - query.first, rows.start + end - query.first)
        other = slice(columns.start + first - key.first, columns.start + last - key.first)
        yield ChunkPair(own, other, False, (range(begin, end), range(first, last)))


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, ring: Ring, scale: float, layer: LayerRule = PLAIN
) -> Tensor:
    """Attention of this rank's queries to the keys of all ranks of the ring.

    query: [own tokens, heads, dim]; key, value: [own tokens, kv heads, dim]. Returns [own tokens, heads, dim]. What a
    layer's window hides travels all the same. Raises ValueError for a window or chunk without causality."""
    if layer.bounds and not ring.causal:
        raise ValueError(f"window={layer.window}, chunk={layer.chunk}: a ring that is not causal has neither")
    return _RingAttention.apply(query, key, value, ring, scale, layer)


def merge(output: Tensor, lse: Tensor, block_output: Tensor, block_lse: Tensor) -> None:
    """Add a block to what is there, in place: output [tokens, heads, dim], lse [heads, tokens], both exact.

    A row that has seen nothing yet carries lse = -inf."""
    total = torch.logaddexp(lse, block_lse)
    share = torch.where(total == float("-inf"), 0.0, (block_lse - total).exp())
    # One kernel that reads both outputs and writes one.
    output.lerp_(block_output.to(output.dtype), share.transpose(0, 1)[..., None])
    lse.copy_(total)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, ring: Ring, scale: float, layer: LayerRule
    ) -> Tensor:
        exact = torch.float64 if query.dtype == torch.float64 else torch.float32
        kernel = choose_kernel(query, ring.backend) if layer == PLAIN else Dense()
        output = query.new_zeros(query.shape, dtype=exact)
        lse = query.new_full((query.shape[1], len(query)), float("-inf"), dtype=exact)
        others = []
        for source, states in _blocks(torch.stack([key, value]), ring):
            if ring.keeps and source != ring.rank:
                others.append(states)
            for pair in ring.pairs(source, layer):
                rows, (k, v) = pair.queries, states[:, pair.keys]
                block = pair.block(scale, layer, ring.causal, query.device)
                part, part_lse = kernel.forward(query[rows], k, v, block)
                merge(output[rows], lse[:, rows], part.to(exact), part_lse)
        output = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, output, lse, *others)
        ctx.ring, ctx.scale, ctx.layer, ctx.kernel = ring, scale, layer, kernel
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, lse, *others = ctx.saved_tensors
        ring: Ring = ctx.ring
        grad_query = torch.zeros_like(query, dtype=lse.dtype)
        arrive = _gather_home if ring.gather else _travel_home
        own = torch.stack([key, value])
        shares = (
            (source, _share(ctx, (grad, query, output, lse), states, source, grad_query))
            for source, states in (_kept(own, others, ring) if ring.keeps else _blocks(own, ring))
        )
        grad_key, grad_value = arrive(shares, ring, key).to(key.dtype)
        return grad_query.to(query.dtype), grad_key, grad_value, None, None, None


def _share(
    ctx: Any, given: tuple[Tensor, Tensor, Tensor, Tensor], states: Tensor, source: int, grad_query: Tensor
) -> Tensor:
    """This rank's share of the gradients of keys and values of rank `source`, [2, tokens, heads, dim]."""
    grad, query, output, lse = given
    ring: Ring = ctx.ring
    share = torch.zeros_like(states, dtype=lse.dtype)
    for pair in ring.pairs(source, ctx.layer):
        rows, columns = pair.queries, pair.keys
        k, v = states[:, columns]
        block = pair.block(ctx.scale, ctx.layer, ring.causal, query.device)
        gradients = ctx.kernel.backward(grad[rows], query[rows], k, v, output[rows], lse[:, rows], block)
        grad_query[rows] += gradients[0]
        share[0, columns] += gradients[1]
        share[1, columns] += gradients[2]
    return share


def _blocks(own: Tensor, ring: Ring) -> Iterator[tuple[int, Tensor]]:
    """Keys and values of every rank, [2, tokens, heads, dim], by rank: this one's own first, then as they come around.

    The next are already being received while the caller works on these."""
    ranks = len(ring.chunks)
    if ring.gather and ranks > 1:
        sizes = [ring.tokens(rank) for rank in range(ranks)]
        rows = own.transpose(0, 1)  # [tokens, 2, heads, dim]
        everyone = exchange_rows(rows.repeat(ranks, 1, 1, 1), [len(rows)] * ranks, sizes, ring.group)
        parts = everyone.split(sizes)
        yield from ((ring.source(step), parts[ring.source(step)].transpose(0, 1)) for step in range(ranks))
        return
    states = own
    for step in range(ranks):
        coming = None
        if step + 1 < ranks:
            coming = Shift(states, (2, ring.tokens(ring.source(step + 1)), *own.shape[2:]), ring.group)
        yield ring.source(step), states
        if coming is not None:
            states = coming.wait()


def _kept(own: Tensor, others: Sequence[Tensor], ring: Ring) -> Iterator[tuple[int, Tensor]]:
    """As `_blocks`, from what forward kept; this rank's own last, while the others' gradients are being sent."""
    yield from ((ring.source(step), states) for step, states in enumerate(others, 1))
    yield ring.rank, own


def _travel_home(shares: Iterator[tuple[int, Tensor]], ring: Ring, key: Tensor) -> Tensor:
    """Sum the shares of all ranks as gradients travel with their keys; what arrives is this rank's own."""
    coming = None
    for source, share in shares:
        if source == ring.rank:
            own = share
            continue
        total = share if coming is None else coming.wait().add_(share)
        following = ring.tokens((source - 1) % len(ring.chunks))
        coming = Shift(total, (2, following, *key.shape[1:]), ring.group)
    return own if coming is None else coming.wait().add_(own)


def _gather_home(shares: Iterator[tuple[int, Tensor]], ring: Ring, key: Tensor) -> Tensor:
    """Send every rank its share, and sum what comes, in rank order."""
    ranks = len(ring.chunks)
    by_rank = [share.transpose(0, 1) for _, share in sorted(shares, key=itemgetter(0))]
    sizes = [len(share) for share in by_rank]
    own = ring.tokens(ring.rank)
    received = exchange_rows(torch.cat(by_rank), sizes, [own] * ranks, ring.group)
    return received.view(ranks, own, 2, *key.shape[1:]).sum(0).transpose(0, 1)


def _with_rows(ranges: Shard) -> Iterator[tuple[TokenRange, slice]]:
    starts = [0, *accumulate(piece.count for piece in ranges)]
    for piece, start in zip(ranges, starts):
        yield piece, slice(start, start + piece.count)
