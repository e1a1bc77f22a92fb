"""States of tokens shared out over tensor ranks: gathered and scattered, with gradients, and kept as shares."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from dhp.parallel.comm import gather_alike, sum_scattered
from dhp.parallel.recompute.saved_tensors import detached, note, top_hooks

Shape = tuple[int, ...]


@dataclass(frozen=True)
class TensorRanks:
    """The ranks that share out tokens. group: None on the meta device, where there are shapes alone."""

    size: int
    group: dist.ProcessGroup | None = None

    @classmethod
    def of(cls, mesh: DeviceMesh) -> TensorRanks:
        """Those of a mesh of one axis."""
        return cls(mesh.size(), mesh.get_group())

    def share(self, tokens: int) -> int:
        """Tokens of one rank, with what fills them up."""
        return -(-tokens // self.size)

    def gather(self, share: Tensor, tokens: int) -> Tensor:
        """[share, hidden] → [tokens, hidden]."""
        if self.group is None:
            return share.new_empty(self.size * len(share), *share.shape[1:])[:tokens]
        return gather_alike(share, self.group).flatten(0, 1)[:tokens]

    def sum(self, states: Tensor) -> Tensor:
        """[tokens, hidden], a part of a sum → this rank's [share, hidden] of the sum."""
        filled = self._filled(states)
        if self.group is None:
            return filled.new_empty(len(filled) // self.size, *filled.shape[1:])
        return sum_scattered(filled, self.group)

    def own(self, states: Tensor) -> Tensor:
        """[tokens, hidden] → this rank's [share, hidden], in memory of its own."""
        rank = 0 if self.group is None else dist.get_rank(self.group)
        return self._filled(states).chunk(self.size)[rank].clone()

    def _filled(self, states: Tensor) -> Tensor:
        missing = self.share(len(states)) * self.size - len(states)
        return F.pad(states, (0, 0, 0, missing)) if missing else states


class _Gather(torch.autograd.Function):
    """[1, share, hidden] → [*shape, hidden] on every rank. summed: ranks have parts of its gradient; else all of it."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, shape: Shape, ranks: TensorRanks, summed: bool) -> Tensor:
        ctx.ranks, ctx.summed = ranks, summed
        return ranks.gather(share[0], prod(shape)).view(*shape, share.shape[-1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        flat = grad.reshape(-1, grad.shape[-1])
        return (ctx.ranks.sum(flat) if ctx.summed else ctx.ranks.own(flat))[None], None, None, None


class _Scatter(torch.autograd.Function):
    """[*shape, hidden] → [1, share, hidden]. summed: ranks have parts of a sum; else the same states."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, ranks: TensorRanks, summed: bool) -> Tensor:
        ctx.ranks, ctx.shape = ranks, states.shape[:-1]
        flat = states.reshape(-1, states.shape[-1])
        return (ranks.sum(flat) if summed else ranks.own(flat))[None]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.ranks.gather(grad[0], prod(ctx.shape)).view(*ctx.shape, grad.shape[-1]), None, None


def gather(share: Tensor, shape: Shape, ranks: TensorRanks, summed: bool) -> Tensor:
    """[1, share, hidden] of each rank → [*shape, hidden] on all. summed: ranks have parts of its gradient, which are
    added; else all of it."""
    return _Gather.apply(share, shape, ranks, summed)


def scatter(states: Tensor, ranks: TensorRanks, summed: bool) -> Tensor:
    """[*shape, hidden] → this rank's [1, share, hidden]. summed: of the sum over the ranks; else of what all have."""
    return _Scatter.apply(states, ranks, summed)


class _Again:
    """Gathered states of one call, as the share that they are gathered from again when backward first asks for them,
    until the last of those that saved them has had them."""

    def __init__(self, share: Any, unpack: Callable[[Any], Tensor], tokens: int, ranks: TensorRanks):
        self._share, self._unpack, self._tokens, self._ranks = share, unpack, tokens, ranks
        self._full: Tensor | None = None

    def take(self, size: Shape, stride: Shape, offset: int) -> Tensor:
        if self._full is None:
            self._full = self._ranks.gather(self._unpack(self._share)[0], self._tokens)
            note(self._full)
        return self._full.as_strided(size, stride, offset)


@contextmanager
def keeping_shares(full: Tensor, share: Tensor, ranks: TensorRanks) -> Iterator[None]:
    """In the block, what autograd saves of the gathered states `full` is kept as the share, and gathered again."""
    pack, unpack = top_hooks() or (detached, _same)
    storage, tokens = full.untyped_storage()._cdata, prod(full.shape[:-1])
    again: list[_Again] = []
    own = [share.detach()]

    def save(tensor: Tensor) -> Any:
        if tensor.untyped_storage()._cdata != storage:
            return pack(tensor)
        if not again:
            again.append(_Again(pack(own[0]), unpack, tokens, ranks))
        return again[0], tuple(tensor.shape), tensor.stride(), tensor.storage_offset()

    def get(saved: Any) -> Tensor:
        if isinstance(saved, tuple) and saved and isinstance(saved[0], _Again):
            return saved[0].take(*saved[1:])
        return unpack(saved)

    with torch.autograd.graph.saved_tensors_hooks(save, get):
        yield
    again.clear()  # or the hooks, which the graph keeps, would keep them
    own.clear()


def _same(saved: Any) -> Any:
    return saved
