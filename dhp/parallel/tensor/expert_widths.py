"""Tensor parallelism of experts: each rank holds a slice of every expert's inner width.

Gate and up are cut along their outputs, down along its inputs, as in a dense layer (`dhp.parallel.tensor.styles`): one
entry (*f*) and one sum (*g*) a layer. What a token's experts give is weighted before the sum, so a rank has a part of
the gradient of the weights too, and these enter with the states. The router, which sees what all ranks see, is whole on
each.

Files lay experts out in several ways, some transposed, so which values a slice of the width has is known only when a
whole expert was read. Each rank therefore reads some experts whole (`dhp.parallel.expert.shares`), and then the ranks
exchange: no value is read twice, and no rank holds more than its part of the model.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from dhp.core.errors import ModelError
from dhp.parallel.comm import exchange_rows, sum_in_place
from dhp.parallel.expert.modules import DOWN, GATE_UP, experts_of
from dhp.parallel.tensor.slices import Cut, cut_of, mark
from dhp.parallel.tensor.styles import sum_of_ranks

_PLACES: dict[str, Placement] = {GATE_UP: _StridedShard(1, split_factor=2), DOWN: Shard(2)}


def cut_widths(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give each rank of `mesh` its slice of the width of all experts, in a model that was read by shares and has plain
    tensors (`dhp.parallel.tensor.slices`), and let it compute with it.

    Raises ModelError where the width is no multiple of the ranks.
    """
    for name, experts in experts_of(model).items():
        for own, place in _PLACES.items():
            cut = cut_of(experts, own)
            shape = None if cut is None else cut.shape
            if shape is None:
                raise ModelError(f"{name}.{own} was not read by shares; the tensor-parallel plan leaves experts out")
            width = shape[2] if own == DOWN else shape[1] // 2
            if width % mesh.size():
                raise ModelError(
                    f"tensor parallelism cannot cut the inner width of {name}: width({width}) % "
                    f"tensor({mesh.size()}) = {width % mesh.size()} != 0. Set text.tensor to a divisor of {width}"
                )
            whole = experts.get_parameter(own)
            slices = _exchange(own, whole.detach(), shape, mesh)
            experts._parameters[own] = nn.Parameter(slices, whole.requires_grad)
            mark(experts, own, Cut(mesh, (place,), shape))
        _enter_and_sum(experts, mesh.get_group())


def _exchange(own: str, held: Tensor, shape: torch.Size, mesh: DeviceMesh) -> Tensor:
    """From some experts whole to a slice of each."""
    ranks, group = mesh.size(), mesh.get_group()
    coming = [Shard.local_shard_size_and_offset(shape[0], ranks, rank)[0] for rank in range(ranks)]
    experts, out, inner = len(held), shape[1], shape[2]
    if own == DOWN:
        by_rank = held.view(experts, out, ranks, inner // ranks).permute(2, 0, 1, 3)
    else:
        by_rank = held.view(experts, 2, ranks, out // 2 // ranks, inner).permute(2, 0, 1, 3, 4)
    found = exchange_rows(by_rank.flatten(0, 1), [experts] * ranks, coming, group)
    return found if own == DOWN else found.flatten(1, 2)


def _enter_and_sum(experts: nn.Module, group: dist.ProcessGroup) -> None:
    inner = experts.forward

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        states, weights = _Enter.apply(hidden_states, top_k_weights, group)
        return sum_of_ranks(inner(states, top_k_index, weights), group)

    experts.forward = forward


class _Enter(torch.autograd.Function):
    """Megatron's f of states and weights: identity forward; backward, one sum over the ranks of both gradients."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, weights: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
        ctx.group = group
        return states.view_as(states), weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        exact = torch.promote_types(*(grad.dtype for grad in grads))
        flat = torch.cat([grad.to(exact).flatten() for grad in grads])
        sum_in_place(flat, ctx.group)
        summed = zip(grads, flat.split([grad.numel() for grad in grads]), strict=True)
        return *(own.view_as(grad).to(grad.dtype) for grad, own in summed), None
