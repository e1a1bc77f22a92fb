"""Exchanges tokens and heads (Jacobs et al. 2023, section 3).

Each rank holds part of the sequence with all heads; an all-to-all turns that into the whole sequence with part of the
heads, attention runs, and a second all-to-all turns it back. Shards may be of any length: the all-to-all carries split
sizes, no sequence is padded. Heads are, by zeros, where ranks do not divide them (`dhp.core.heads.HeadShares`)."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dhp.core.heads import HeadShares
from dhp.parallel.comm import AllToAll


@dataclass(frozen=True)
class UlyssesGroup:
    """The Ulysses ranks that share one sequence: tokens on each of them, in rank order, and their group; None for one
    rank, which exchanges nothing."""

    rank_tokens: tuple[int, ...]
    rank: int
    group: dist.ProcessGroup | None

    @property
    def degree(self) -> int:
        return len(self.rank_tokens)

    def heads_to_rank(
        self, query: Tensor, key: Tensor, value: Tensor, shares: HeadShares
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Each [own tokens, heads, dim] → [all tokens, this rank's heads of `shares`, dim], in one exchange.

        Key and value may have fewer heads. Copies and zeros are as in `HeadShares`; autograd sums the gradients of
        copies, and those of zeros are dropped."""
        by_rank = [cut_queries(query, shares), *(cut_keys(states, shares) for states in (key, value))]
        widths = [shares.a_rank, shares.count, shares.count]
        query, key, value = self.columns_to_rank(torch.cat(by_rank, dim=2)).split(widths, dim=1)
        return query, key, value

    def tokens_to_rank(self, output: Tensor, shares: HeadShares) -> Tensor:
        """[all tokens, this rank's heads, dim] → [own tokens, heads, dim]."""
        return join_heads(self.rows_to_rank(output), shares)

    def columns_to_rank(self, states: Tensor) -> Tensor:
        """[own tokens, ranks, …], what is for each rank → [all tokens, …], this rank's, rank by rank."""
        tokens = len(states)
        rows = states.transpose(0, 1).reshape(self.degree * tokens, *states.shape[2:])
        return AllToAll.apply(rows, (tokens,) * self.degree, self.rank_tokens, self.group)

    def rows_to_rank(self, output: Tensor) -> Tensor:
        """[all tokens, …], this rank's columns → [own tokens, ranks, …], those of all."""
        own = self.rank_tokens[self.rank]
        rows = AllToAll.apply(output, self.rank_tokens, (own,) * self.degree, self.group)
        return rows.view(self.degree, own, *output.shape[1:]).transpose(0, 1)


def cut_queries(query: Tensor, shares: HeadShares) -> Tensor:
    """[tokens, heads, dim] → [tokens, ranks, a rank's query heads, dim]."""
    tokens, _, dim = query.shape
    groups = query.view(tokens, shares.kv_heads, shares.heads // shares.kv_heads, dim)
    groups = _filled(groups, 2, shares.copies * shares.size)
    subsets = groups.reshape(tokens, shares.subsets, shares.size, dim)
    return _filled(subsets, 1, shares.ranks * shares.count).reshape(tokens, shares.ranks, shares.a_rank, dim)


def cut_keys(states: Tensor, shares: HeadShares) -> Tensor:
    """Keys or values, [tokens, kv_heads, dim] → [tokens, ranks, count, dim]."""
    tokens, _, dim = states.shape
    copies = states if shares.copies == 1 else states.repeat_interleave(shares.copies, dim=1)
    return _filled(copies, 1, shares.ranks * shares.count).reshape(tokens, shares.ranks, shares.count, dim)


def join_heads(output: Tensor, shares: HeadShares) -> Tensor:
    """[tokens, ranks, a rank's query heads, dim] → [tokens, heads, dim]."""
    tokens, dim = len(output), output.shape[-1]
    if shares.ranks * shares.a_rank == shares.heads:
        return output.flatten(1, 2)
    subsets = output.reshape(tokens, shares.ranks * shares.count, shares.size, dim)[:, : shares.subsets]
    groups = subsets.reshape(tokens, shares.kv_heads, shares.copies * shares.size, dim)
    return groups[:, :, : shares.heads // shares.kv_heads].reshape(tokens, shares.heads, dim)


def _filled(states: Tensor, axis: int, length: int) -> Tensor:
    """Zeros behind the states along an axis, up to `length`."""
    missing = length - states.shape[axis]
    return F.pad(states, (*[0, 0] * (states.ndim - 1 - axis), 0, missing)) if missing else states
