"""Exchanges tokens and heads (Jacobs et al. 2023, section 3).

Each rank holds part of the sequence with all heads; an all-to-all turns that into the whole sequence with part of the
heads, attention runs, and a second all-to-all turns it back. Shards may be of any length: the all-to-all carries split
sizes, nothing is padded."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dhp.parallel.comm import AllToAll


@dataclass(frozen=True)
class UlyssesGroup:
    """The Ulysses ranks that share one sequence: tokens on each of them, in rank order, and their group."""

    rank_tokens: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup

    @property
    def degree(self) -> int:
        return len(self.rank_tokens)

    def heads_to_rank(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Each [own tokens, heads, dim] → [all tokens, heads / degree, dim], in one exchange.

        Key and value may have fewer heads; with fewer than ranks, or a number that the degree does not divide, they are
        repeated first, and autograd sums the gradients of the copies. Raises ValueError when heads cannot be divided.
        """
        copies = key_copies(query.shape[1], key.shape[1], self.degree)
        if copies > 1:
            key, value = (s.repeat_interleave(copies, dim=1) for s in (key, value))
        tokens, _, dim = query.shape
        widths = [s.shape[1] // self.degree for s in (query, key, value)]
        states = zip((query, key, value), widths, strict=True)
        by_rank = [s.reshape(tokens, self.degree, width, dim) for s, width in states]
        rows = torch.cat(by_rank, dim=2).transpose(0, 1).reshape(self.degree * tokens, sum(widths), dim)
        exchanged = AllToAll.apply(rows, (tokens,) * self.degree, self.rank_tokens, self.group)
        query, key, value = exchanged.split(widths, dim=1)
        return query, key, value

    def tokens_to_rank(self, output: Tensor) -> Tensor:
        """[all tokens, heads / degree, dim] → [own tokens, heads, dim]."""
        own = self.rank_tokens[self.rank]
        rows = AllToAll.apply(output, self.rank_tokens, (own,) * self.degree, self.group)
        return rows.view(self.degree, own, *output.shape[1:]).transpose(0, 1).flatten(1, 2)


def key_copies(heads: int, kv_heads: int, degree: int) -> int:
    """The number of copies of each key/value head so that every Ulysses rank gets whole heads, query and key alike.

    Raises ValueError, naming the numbers, when there is no way."""
    copies = degree // math.gcd(kv_heads, degree)
    if heads % degree or heads % (kv_heads * copies):
        raise ValueError(
            f"{heads} query heads and {kv_heads} key/value heads cannot be divided over ulysses={degree} ranks whole: "
            f"heads % ulysses = {heads % degree}, "
            f"heads % (kv_heads × {copies} copies) = {heads % (kv_heads * copies)}. "
            "Use a degree that divides the query heads, and more ring ranks instead"
        )
    return copies
