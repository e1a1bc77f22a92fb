"""Shares of attention heads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

QUERY, KEY, OUTPUT = "query", "key", "output"  # what a projection of attention makes or takes; KEY: values too


@dataclass(frozen=True)
class HeadShares:
    """How ranks share `heads` query heads, of which as many in a row see one of `kv_heads` key/value heads.

    The queries of a key/value head are cut into subsets of `size`, with a copy of it for each, and every rank takes
    `count` subsets in a row. Where numbers do not divide, heads of zeros stand at the end of a key/value head's last
    subset, and behind the last subset of all."""

    heads: int
    kv_heads: int
    ranks: int
    size: int
    count: int

    @property
    def a_rank(self) -> int:
        """Query heads of a rank."""
        return self.count * self.size

    @property
    def copies(self) -> int:
        """Of each key/value head: its subsets of queries."""
        return -(-self.heads // self.kv_heads // self.size)

    @property
    def subsets(self) -> int:
        return self.kv_heads * self.copies

    @property
    def busy(self) -> int:
        """Ranks with heads that are not zeros alone."""
        return -(-self.subsets // self.count)


@lru_cache
def share_heads(heads: int, kv_heads: int, ranks: int, filled: bool = True) -> HeadShares:
    """The shares with the fewest query heads on a rank, and of these the ones with the fewest key/value heads.

    filled: subsets may be filled up with zeros, and ranks may be left without any; else `ranks` is `heads` at most."""
    group = heads // kv_heads
    sizes = [size for size in range(1, group + 1) if filled or (not group % size and heads // size >= ranks)]
    counts = {size: -(-kv_heads * -(-group // size) // ranks) for size in sizes}
    size = min(sizes, key=lambda size: (counts[size] * size, counts[size]))
    return HeadShares(heads, kv_heads, ranks, size, counts[size])


class Projection(NamedTuple):
    """A projection of attention with so many heads, by its role."""

    role: str
    heads: int
    kv_heads: int


@dataclass(frozen=True)
class HeadRange:
    """Heads of a rank, in a row: of queries from `first` to before `end`; of keys and values from `first_kv`, each as
    often as `repeats` says, for as many subsets of queries."""

    first: int
    end: int
    first_kv: int
    repeats: tuple[int, ...]


def head_range(heads: int, kv_heads: int, ranks: int, rank: int) -> HeadRange:
    """Of ranks without zeros: the numbers of subsets differ by one at most, and the first rank has the most."""
    shares = share_heads(heads, kv_heads, ranks, filled=False)
    first, end = (-(-number * shares.subsets // ranks) for number in (rank, rank + 1))
    of = [subset // shares.copies for subset in range(first, end)]
    repeats = tuple(of.count(head) for head in dict.fromkeys(of))
    return HeadRange(first * shares.size, end * shares.size, of[0] if of else 0, repeats)


def cuts_evenly(heads: int, kv_heads: int, ranks: int) -> bool:
    """Whether each rank has as many query heads, and as many whole key/value heads or one that it shares."""
    return heads % ranks == 0 and (kv_heads % ranks == 0 or ranks % kv_heads == 0)


def fills_evenly(heads: int, kv_heads: int, ranks: int) -> bool:
    """Whether shares need no zeros."""
    shares = share_heads(heads, kv_heads, ranks)
    return shares.subsets * shares.size == heads and shares.subsets == ranks * shares.count
