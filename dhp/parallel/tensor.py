"""Tensor parallelism beyond transformers' own plans: fused projections, and key and value heads that ranks share.

With fewer key/value heads than tensor ranks, `ranks / heads` neighbours need the same head. Each rank keeps the whole
projection (it is small), computes the one head its query heads attend to, and the projection's gradients, of which
each rank has the part that its query heads give, are summed over the tensor ranks once a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.tensor_parallel import PackedColwiseParallel, TensorParallelLayer

from dhp.parallel.collectives import sum_in_place

PARTIAL_OVER = "dhp_partial_over"  # on a module: the ranks over which its gradients are parts of a sum


class _ToAllRanks(torch.autograd.Function):
    """Megatron's f: identity forward; the gradients of all tensor ranks are summed backward."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return states.view_as(states)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sum_in_place(grad.contiguous().clone(), ctx.group), None


class SharedHeads(TensorParallelLayer):
    """A transformers parallel style: the whole projection on every rank, which computes one of its `heads` heads."""

    def __init__(self, heads: int):
        self.heads = heads

    def install_forward(self, module: nn.Linear, mesh: DeviceMesh) -> nn.Linear:
        """Make `module` map [..., in] to this rank's head, [..., out / heads]."""
        group, ranks = mesh.get_group(), mesh.size()
        width = module.out_features // self.heads
        head = mesh.get_local_rank() * self.heads // ranks
        own = slice(head * width, (head + 1) * width)

        def forward(states: Tensor) -> Tensor:
            bias = None if module.bias is None else module.bias[own]
            return F.linear(_ToAllRanks.apply(states, group), module.weight[own], bias)

        module.forward = forward
        setattr(module, PARTIAL_OVER, group)
        return module


class FusedProjections(PackedColwiseParallel):
    """A transformers parallel style for one matrix that holds several side by side, each of which is to be split.

    Its own style of this kind cuts the bias as if it were one vector, so that ranks add others' biases.
    """

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Give this rank its slice of each of the fused matrices, or vectors."""
        whole = module._parameters.get(param)
        if whole is not None:
            each = _StridedShard(0, split_factor=self.split_factor)
            slices = distribute_tensor(whole, mesh, [each], src_data_rank=None)
            module._parameters[param] = nn.Parameter(slices, whole.requires_grad)


def with_fused(plan: Mapping[str, str], fused: Mapping[str, int]) -> dict[str, str]:
    """A tensor plan (style by module) with the modules that are several matrices in one, by their number.

    Their styles are registered with transformers here.
    """
    for count in set(fused.values()):
        ALL_PARALLEL_STYLES.register(f"dhp_fused_{count}", FusedProjections(split_factor=count))
    return dict(plan) | {name: f"dhp_fused_{count}" for name, count in fused.items()}


def shared_heads_style(heads: int) -> str:
    """The name of the style for `heads` heads, registered with transformers."""
    name = f"dhp_shared_heads_{heads}"
    ALL_PARALLEL_STYLES.register(name, SharedHeads(heads))
    return name


def partial_parameters(model: nn.Module) -> Iterator[tuple[nn.Parameter, dist.ProcessGroup]]:
    """Parameters whose gradients are parts of a sum over the tensor ranks, and these ranks."""
    for module in model.modules():
        group = module.__dict__.get(PARTIAL_OVER)
        if group is not None:
            for parameter in module.parameters(recurse=False):
                yield parameter, group
