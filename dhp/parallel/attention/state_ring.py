"""Passes state along the pieces of a row which ranks hold, for layers with fewer heads than ranks.

A gated delta rule is affine in the state S before its tokens: outputs O + P S, and B + A S behind them. Each rank
computes O, P, A and B of its pieces with the library's rule at once: P and A are what that makes of the identity as
the state, and of values of zero. Ranks exchange A and B for heads, take the products of a segment's pieces in order,
and exchange back the state before each piece. A convolution gets the last inputs before a piece, as tokens, from the
ranks that have them. Pieces may be zigzag, contiguous or of any length. Yang et al. 2025, "Gated Delta Networks".
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dhp.core.batch import TokenRange
from dhp.parallel.attention.shard_plan import Shard, count_tokens, even_counts, is_whole
from dhp.parallel.comm import AllToAll

WHOLE, FIRST, LATER = range(3)  # kinds of pieces: a whole segment, the first tokens of one, others


@dataclass(frozen=True)
class StateRing:
    """How a rank's pieces get the state before them.

    kinds: of each group of the row's plan. border: inputs of a convolution that a token sees before itself. sent: rows
    that are borders of others' pieces, in the order of ranks; sends, receives: how many go to and come from each.

    counts: divided pieces of each rank; they are numbered rank by rank, in the order of the calls. chains: of segments
    with most pieces first, the numbers of their first pieces, of their second ones, and so on.

    last: rank, group and place there of the piece that ends the first segment."""

    group: dist.ProcessGroup | None
    rank: int
    kinds: tuple[int, ...]
    border: int
    sent: Tensor
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    counts: tuple[int, ...]
    chains: tuple[tuple[int, ...], ...]
    last: tuple[int, int, int]

    def with_borders(self, rows: Tensor) -> Tensor:
        """[tokens, columns], this rank's → these, behind them the borders that come from others, and a row of zeros."""
        zero = rows.new_zeros(1, rows.shape[1])
        if not self.chains:
            return torch.cat([rows, zero])
        return torch.cat([rows, AllToAll.apply(rows[self.sent], self.sends, self.receives, self.group), zero])

    def states_before(self, effects: Tensor, width: int) -> Tensor:
        """The state before each of this rank's divided pieces, [pieces, heads, key width, value width].

        effects: B and A of each side by side, [pieces, heads, key width, value width + key width]; width: of values."""
        if not self.chains:
            return effects[..., :width]
        heads, each = effects.shape[1], effects.shape[2:]
        shares = even_counts(heads, len(self.counts))
        share, own = shares[self.rank], self.counts[self.rank]
        sends, receives = [one * own for one in shares], [share * one for one in self.counts]
        rows = AllToAll.apply(effects.transpose(0, 1).flatten(0, 1), sends, receives, self.group)
        parts = [part.view(share, count, *each) for part, count in zip(rows.split(receives), self.counts)]
        every = torch.cat(parts, dim=1)
        before = self._products(*every.split([width, each[1] - width], dim=3))
        back = torch.cat([part.flatten(0, 1) for part in before.split(self.counts, dim=1)])
        return AllToAll.apply(back, receives, sends, self.group).view(heads, own, each[0], width).transpose(0, 1)

    def _products(self, added: Tensor, factors: Tensor) -> Tensor:
        """added: B, factors: A of all pieces of some heads, [heads, pieces, …] → the state before each."""
        before = [torch.zeros_like(added[:, list(self.chains[0])])]
        for at, following in zip(self.chains, self.chains[1:]):
            states = added[:, list(at)] + factors[:, list(at)] @ before[-1]
            before.append(states[:, : len(following)])
        numbers = torch.tensor([number for at in self.chains for number in at], device=added.device)
        return torch.cat(before, dim=1)[:, torch.argsort(numbers)]


class Calls(NamedTuple):
    """How a rank computes its pieces, numbered as its chunk has them: of each call the kind of its pieces, the tokens
    of each, and their numbers."""

    kinds: tuple[int, ...]
    tokens: tuple[int, ...]
    numbers: tuple[tuple[int, ...], ...]

    @property
    def divided(self) -> list[int]:
        """Pieces of divided segments, in the order of the calls."""
        return [one for kind, numbers in zip(self.kinds, self.numbers) if kind != WHOLE for one in numbers]


def plan_calls(chunk: Shard, lengths: Sequence[int], multiple: int = 1) -> Calls:
    """A call takes pieces of one kind and length, or whole segments of as many times `multiple` tokens. lengths: of all
    segments of the row."""
    found = defaultdict[tuple[int, int], list[int]](list)
    for number, piece in enumerate(chunk):
        kind = WHOLE if is_whole(piece, lengths) else LATER if piece.first else FIRST
        found[kind, -(-piece.count // multiple) * multiple if kind == WHOLE else piece.count].append(number)
    return Calls(
        tuple(kind for kind, _ in found), tuple(length for _, length in found), tuple(map(tuple, found.values()))
    )


def plan_ring(
    chunks: Sequence[Shard],
    lengths: Sequence[int],
    rank: int,
    group: dist.ProcessGroup | None,
    border: int,
    multiple: int = 1,
) -> tuple[StateRing, Calls, list[list[int]]]:
    """A rank's part in a row of segments of these lengths, of which each rank has a chunk, and its calls. And for each
    of its pieces the places of its border in what `StateRing.with_borders` returns; before a segment is the row of
    zeros."""
    calls, find = [plan_calls(chunk, lengths, multiple) for chunk in chunks], _Owners(chunks).find
    wanted = [[at for piece in chunk for at in _border(piece, border)] for chunk in chunks]
    sent = [[place for owner, place in map(find, of_rank) if owner == rank] for of_rank in wanted]
    coming = sorted(wanted[rank], key=lambda at: find(at)[0])
    owners, own = [find(at)[0] for at in coming], count_tokens(chunks[rank])
    places = {at: own + number for number, at in enumerate(coming)}
    borders = []
    for piece in chunks[rank]:
        there = [places[at] for at in _border(piece, border)]
        borders.append([own + len(coming)] * (border - len(there)) + there)
    numbers = list(accumulate((len(one.divided) for one in calls), initial=0))
    by_segment = defaultdict[int, list[tuple[int, int]]](list)  # (first token, number among divided pieces) of each
    for chunk, one, first in zip(chunks, calls, numbers):
        for number, piece in enumerate(one.divided, first):
            by_segment[chunk[piece].segment].append((chunk[piece].first, number))
    chains = sorted((sorted(one) for one in by_segment.values()), key=len, reverse=True)
    longest = len(chains[0]) if chains else 0
    ring = StateRing(
        group,
        rank,
        calls[rank].kinds,
        border,
        torch.tensor([place for places in sent for place in places], dtype=torch.long),
        tuple(map(len, sent)),
        tuple(owners.count(source) for source in range(len(chunks))),
        tuple(len(one.divided) for one in calls),
        tuple(tuple(chain[at][1] for chain in chains if len(chain) > at) for at in range(longest)),
        _find_end(chunks, calls, lengths[0]),
    )
    return ring, calls[rank], borders


def _border(piece: TokenRange, border: int) -> list[tuple[int, int]]:
    """(Segment, token) of those before the piece, `border` or as many as there are."""
    return [(piece.segment, token) for token in range(max(0, piece.first - border), piece.first)]


def _find_end(chunks: Sequence[Shard], calls: Sequence[Calls], length: int) -> tuple[int, int, int]:
    """Rank, call and place in it of the piece with the last token of the first segment; zeros where it has none."""
    ends = (
        (rank, call, place)
        for rank, (chunk, of_rank) in enumerate(zip(chunks, calls))
        for call, numbers in enumerate(of_rank.numbers)
        for place, number in enumerate(numbers)
        if chunk[number].segment == 0 and chunk[number].end == length
    )
    return next(ends, (0, 0, 0))


class _Owners:
    """Where tokens are: rank, and place in its chunk."""

    def __init__(self, chunks: Sequence[Shard]):
        self._pieces = defaultdict[int, list[tuple[int, int, int]]](list)  # by segment: first token, rank, its place
        for rank, chunk in enumerate(chunks):
            for piece, place in zip(chunk, accumulate((one.count for one in chunk), initial=0)):
                self._pieces[piece.segment].append((piece.first, rank, place))
        for pieces in self._pieces.values():
            pieces.sort()

    def find(self, at: tuple[int, int]) -> tuple[int, int]:
        segment, token = at
        pieces = self._pieces[segment]
        first, rank, place = pieces[bisect_right(pieces, token, key=itemgetter(0)) - 1]
        return rank, place + token - first
