"""Expert parallelism: each of a group of ranks holds some experts, and computes with what all of them send."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.tensor_parallel import TensorParallelLayer

from dhp.base.errors import ModelError
from dhp.parallel.experts.dispatch import visit
from dhp.parallel.experts.modules import experts_of
from dhp.parallel.experts.product import run_experts

SUMMED_OVER = "dhp_summed_over"  # on a module: the ranks over which the gradients of its parameters are summed
SHARE = "dhp_experts_share"


class Share(TensorParallelLayer):
    """Some experts of a layer, whole: a rank reads those alone."""

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Give this rank its share along the dimension of experts."""
        whole = module._parameters[param]
        share = distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None)
        module._parameters[param] = nn.Parameter(share, whole.requires_grad)

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """The forward stays: `share_out` or `cut_widths` sets it later."""
        return module


ALL_PARALLEL_STYLES.register(SHARE, Share())


def share_plan(model: nn.Module, _: Mapping[str, str]) -> dict[str, str]:
    """The plan by which each rank reads its experts, and all of everything else: style by parameter."""
    return {
        f"{name}.{own}": SHARE for name, experts in experts_of(model).items() for own, _ in experts.named_parameters()
    }


def check_shares(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """`share_plan` of a whole decoder. Raises ModelError where it has no experts that are known here."""
    found = share_plan(model, plan)
    if not found:
        raise ModelError(
            f"text.expert: {type(model).__name__} has no modules of experts known here, those with transformers' "
            "@use_experts_implementation. Set text.expert=1"
        )
    return found


def share_out(model: nn.Module, group: dist.ProcessGroup, copies: dist.ProcessGroup) -> None:
    """Let a model that was read by `share_plan` send tokens to the ranks of `group` that hold their experts.

    copies: the ranks that hold the same experts as this one, over which their gradients are summed.
    """
    for experts in experts_of(model).values():
        setattr(experts, SUMMED_OVER, copies)
        _visit_group(experts, group)


def _visit_group(experts: nn.Module, group: dist.ProcessGroup) -> None:
    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        compute = lambda rows, groups: run_experts(experts, rows, groups)
        held = next(experts.parameters()).shape[0]
        return visit(hidden_states, top_k_index, top_k_weights, held, group, compute)

    experts.forward = forward


def summed_over(model: nn.Module) -> dict[int, dist.ProcessGroup]:
    """By a parameter's id, the ranks over which its gradients are summed, where these are not all replicas."""
    found = {}
    for module in model.modules():
        group = module.__dict__.get(SUMMED_OVER)
        for parameter in module.parameters(recurse=False) if group is not None else ():
            found[id(parameter)] = group
    return found
