"""Places tokens on ranks of a ring × Ulysses mesh.

A sequence is made of segments (images, frames, documents); a token attends within its own segment. A shard is a list
of ranges, so uneven shards, many segments, and layouts that distribute a segment in pieces are all the same thing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise, product

from dhp.core.batch import TokenRange

Shard = tuple[TokenRange, ...]
_LETTERS = "abcdefghijklmnopqrstuvwxyz"  # of segments, again from the first behind the last


@dataclass(frozen=True)
class ShardPlan:
    """The shards of a mesh's ranks.

    lengths: tokens of each segment. shards: [ring rank][Ulysses rank], the ranges of a rank in the order of its rows.
    """

    lengths: tuple[int, ...]
    shards: tuple[tuple[Shard, ...], ...]

    @property
    def ring(self) -> int:
        return len(self.shards)

    @property
    def ulysses(self) -> int:
        return len(self.shards[0])

    def draw(self, width: int = 64) -> str:
        """A line a rank, as figure 5 of LongVILA has it: the letter of the segment where the rank holds tokens, a dot
        where others do. width: columns, each of as many tokens; a column shows its first token."""
        tokens = sum(self.lengths)
        columns = min(width, tokens)
        letters = [_LETTERS[n % len(_LETTERS)] for n, length in enumerate(self.lengths) for _ in range(length)]
        lines = []
        for ring, ulysses in product(range(self.ring), range(self.ulysses)):
            own = set(self.positions(ring, ulysses))
            shown = (column * tokens // columns for column in range(columns))
            row = "".join(letters[at] if at in own else "." for at in shown)
            lines.append(f"ring {ring} ulysses {ulysses}  {row}  {len(own):,} tokens")
        return "\n".join(lines)

    def rank_tokens(self, ring_rank: int) -> tuple[int, ...]:
        """Tokens of each Ulysses rank of a ring rank."""
        return tuple(count_tokens(shard) for shard in self.shards[ring_rank])

    def chunk(self, ring_rank: int) -> Shard:
        """The ranges of a ring rank's Ulysses ranks together, in the order of their rows."""
        return join_ranges(piece for shard in self.shards[ring_rank] for piece in shard)

    def count_tokens(self) -> int:
        """Tokens on all ranks together."""
        return sum(count_tokens(shard) for ring in self.shards for shard in ring)

    def without_whole_segments(self) -> ShardPlan:
        """The plan of the segments that no rank holds whole."""
        shards = (
            tuple(tuple(piece for piece in shard if not is_whole(piece, self.lengths)) for shard in ring)
            for ring in self.shards
        )
        return ShardPlan(self.lengths, tuple(shards))

    def positions(self, ring_rank: int, ulysses_rank: int) -> list[int]:
        """For each row of a rank, its position in the whole sequence, segments one behind another."""
        return self.rows_of(self.shards[ring_rank][ulysses_rank])

    def rows_of(self, ranges: Iterable[TokenRange]) -> list[int]:
        """The same for the tokens of any ranges."""
        starts = [0, *accumulate(self.lengths)]
        return [starts[s.segment] + token for s in ranges for token in range(s.first, s.end)]


def contiguous_plan(lengths: Sequence[int], ring: int, ulysses: int) -> ShardPlan:
    """Each rank the next part of the sequence, equal to within one token."""
    return given_plan(lengths, even_counts(sum(lengths), ring * ulysses), ring)


def given_plan(lengths: Sequence[int], rank_tokens: Sequence[int], ring: int) -> ShardPlan:
    """Each rank the next part of the sequence, of the given number of tokens; Ulysses ranks innermost.

    For vision shards, whose borders are those of attention windows. Raises ValueError when the numbers do not fit."""
    if sum(rank_tokens) != sum(lengths):
        raise ValueError(f"the ranks hold {sum(rank_tokens)} tokens, but the segments have {sum(lengths)}")
    whole = tuple(TokenRange(segment, 0, length) for segment, length in enumerate(lengths) if length)
    shards = cut_ranges(whole, rank_tokens)
    ulysses = len(rank_tokens) // ring
    return ShardPlan(tuple(lengths), tuple(tuple(shards[r * ulysses : (r + 1) * ulysses]) for r in range(ring)))


def plan_of_shards(lengths: Sequence[int], shards: Sequence[Sequence[tuple[int, int, int]]], ring: int) -> ShardPlan:
    """The plan of given shards: for each rank (ring outermost), (segment, first token, tokens)."""
    ranges, each = [tuple(TokenRange(*span) for span in shard) for shard in shards], len(shards) // ring
    rings = (tuple(ranges[first : first + each]) for first in range(0, len(ranges), each))
    return ShardPlan(tuple(lengths), tuple(rings))


def zigzag_plan(lengths: Sequence[int], ring: int, ulysses: int) -> ShardPlan:
    """For causal attention: each segment in 2 × ring pieces, of which ring rank r gets the r-th and the r-th from the
    end, so that all have the same work; the Ulysses ranks share a ring rank's tokens in order.

    Pieces of a segment are equal to within one token: no length has to be a multiple of anything."""
    chunks = zigzag_chunks(list(enumerate(lengths)), ring)
    shards = (cut_ranges(join_ranges(chunk), even_counts(count_tokens(chunk), ulysses)) for chunk in chunks)
    return ShardPlan(tuple(lengths), tuple(map(tuple, shards)))


def zigzag_chunks(segments: Sequence[tuple[int, int]], ring: int) -> list[list[TokenRange]]:
    """The ranges of each ring rank for some segments in that layout. segments: number and length of each."""
    chunks: list[list[TokenRange]] = [[] for _ in range(ring)]
    for segment, length in segments:
        pieces = cut_ranges((TokenRange(segment, 0, length),), even_counts(length, 2 * ring))
        for r in range(ring):
            chunks[r] += [*pieces[r], *pieces[2 * ring - 1 - r]]
    return chunks


def count_tokens(ranges: Iterable[TokenRange]) -> int:
    """Tokens of all ranges together."""
    return sum(piece.count for piece in ranges)


def is_whole(piece: TokenRange, lengths: Sequence[int]) -> bool:
    """Whether the range is all of its segment."""
    return piece.count == lengths[piece.segment]


def whole_segments(ranges: Iterable[TokenRange], lengths: Sequence[int], in_order: bool) -> list[tuple[int, list[int]]]:
    """The ranges that are whole segments: (tokens, first rows of those of that length). in_order: only neighbours of
    one length together, so that the rows are in order; else all of them."""
    found: list[tuple[int, list[int]]] = []
    by_length: dict[int, list[int]] = {}
    row = 0
    for piece in ranges:
        if is_whole(piece, lengths):
            if in_order and (not found or found[-1][0] != piece.count):
                by_length = {}
            if piece.count not in by_length:
                by_length[piece.count] = []
                found.append((piece.count, by_length[piece.count]))
            by_length[piece.count].append(row)
        row += piece.count
    return found


def cut_ranges(ranges: Sequence[TokenRange], counts: Sequence[int]) -> list[Shard]:
    """Consecutive parts of the given numbers of tokens."""
    starts = [0, *accumulate(piece.count for piece in ranges)]
    parts = []
    for begin, end in pairwise((0, *accumulate(counts))):
        cut = []
        for piece, start in zip(ranges, starts):
            first, last = max(begin - start, 0), min(end - start, piece.count)
            if first < last:
                cut.append(TokenRange(piece.segment, piece.first + first, last - first))
        parts.append(tuple(cut))
    return parts


def even_counts(total: int, parts: int) -> tuple[int, ...]:
    """`total` in parts that differ by one at most."""
    return tuple(total * (i + 1) // parts - total * i // parts for i in range(parts))


def join_ranges(ranges: Iterable[TokenRange]) -> Shard:
    """Neighbours that continue each other made one."""
    joined: list[TokenRange] = []
    for piece in ranges:
        if joined and joined[-1].segment == piece.segment and joined[-1].end == piece.first:
            joined[-1] = TokenRange(piece.segment, joined[-1].first, joined[-1].count + piece.count)
        else:
            joined.append(piece)
    return tuple(joined)
