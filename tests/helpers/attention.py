"""Dense attention written out, and sharded attention on a mesh of ranks, of the same states."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dhp.parallel.attention.segment_plan import MeshPosition, plan_shard
from dhp.parallel.attention.segments import attend_segments
from dhp.parallel.attention.shard_plan import ShardPlan, contiguous_plan, given_plan, zigzag_plan
from dhp.parallel.attention.visibility import PLAIN, LayerRule
from tests.helpers import visibility

CPU = torch.device("cpu")
DIM = 8


@dataclass(frozen=True)
class Attention:
    """One case. rank_tokens: of an uneven layout, else by `layout` (contiguous, zigzag). block_rule: with every second
    three tokens a block; else without."""

    lengths: tuple[int, ...]
    ring: int
    ulysses: int
    heads: int = 4
    kv_heads: int = 4
    causal: bool = True
    layout: str = "contiguous"
    rank_tokens: tuple[int, ...] = ()
    gather: bool = False
    dtype: torch.dtype = torch.float64
    layer: LayerRule = PLAIN
    block_rule: Any = ""
    value_dim: int = DIM

    def blocks(self) -> Tensor | None:
        numbers = torch.arange(sum(self.lengths)) // 3
        return torch.where(numbers % 2 == 0, numbers, -1) if self.block_rule else None

    def plan(self) -> ShardPlan:
        if self.rank_tokens:
            return given_plan(self.lengths, self.rank_tokens, self.ring)
        make = {"contiguous": contiguous_plan, "zigzag": zigzag_plan}[self.layout]
        return make(self.lengths, self.ring, self.ulysses)

    def states(self) -> list[Tensor]:
        """Query, key, value and the gradient of the output, float64, [tokens, heads, dim]."""
        generator = torch.Generator().manual_seed(sum(self.lengths))
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = zip(heads, (DIM, DIM, self.value_dim, self.value_dim), strict=True)
        return [torch.randn(sum(self.lengths), *s, dtype=torch.float64, generator=generator) for s in shapes]


def dense_attention(case: Attention, states: Sequence[Tensor]) -> Tensor:
    """Every token sees its own segment, and with causal attention only what came before, or what the layer says."""
    if case.layer != PLAIN or case.block_rule:
        blocks = case.blocks()
        seen = visibility.dense_mask(
            case.lengths, case.layer, None if blocks is None else blocks.tolist(), case.block_rule
        )
        return visibility.dense_attention(*states, seen, DIM**-0.5, case.layer.softcap)
    q, k, v = (s.transpose(0, 1) for s in states)
    k, v = (s.repeat_interleave(case.heads // case.kv_heads, 0) for s in (k, v))
    segment = torch.repeat_interleave(torch.arange(len(case.lengths)), torch.tensor(case.lengths))
    token = torch.arange(len(segment))
    hidden = segment[:, None] != segment
    if case.causal:
        hidden |= token[:, None] < token
    scores = (q @ k.transpose(1, 2) * DIM**-0.5).masked_fill(hidden, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(0, 1)


def dense_results(case: Attention, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Output, and gradients of query, key and value."""
    *states, grad = (s.to(dtype) for s in case.states())
    leaves = [s.clone().requires_grad_() for s in states]
    output = dense_attention(case, leaves)
    output.backward(grad)
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def sharded_results(cases: Sequence[Attention]) -> list[list[Tensor]]:
    """On a rank: of each case, this rank's rows of the output and of the gradients of query, key and value."""
    meshes: dict[tuple[int, int], MeshPosition] = {}
    return [_sharded(case, _position(case, meshes)) for case in cases]


def whole_results(case: Attention, of_ranks: Sequence[list[Tensor]]) -> list[Tensor]:
    """What all ranks found, put where it belongs in the whole sequence."""
    plan = case.plan()
    positions = [
        torch.tensor(plan.positions(r, u), dtype=torch.long) for r in range(plan.ring) for u in range(plan.ulysses)
    ]
    order = torch.argsort(torch.cat(positions))
    return [torch.cat([found[i] for found in of_ranks])[order] for i in range(4)]


def _position(case: Attention, meshes: dict[tuple[int, int], MeshPosition]) -> MeshPosition:
    shape = (case.ring, case.ulysses)
    if shape not in meshes:
        meshes[shape] = MeshPosition.of(init_device_mesh("cpu", shape, mesh_dim_names=("ring", "ulysses")))
    return meshes[shape]


def _sharded(case: Attention, position: MeshPosition) -> list[Tensor]:
    shards = case.plan()
    own = shards.positions(position.ring_rank, position.ulysses_rank)
    *states, grad = (s[own].to(case.dtype) for s in case.states())
    leaves = [s.clone().requires_grad_() for s in states]
    blocks = {"blocks": case.blocks(), "block_rule": case.block_rule or "bounded"}
    plan = plan_shard(shards, position, CPU, case.causal, case.gather, **blocks)
    output = attend_segments(*leaves, plan, DIM**-0.5, case.layer)
    output.backward(grad)
    assert dist.get_world_size() == shards.ring * shards.ulysses
    return [output.detach(), *(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)]
