"""Expert parallelism: each rank computes some experts for all.

As in GShard (Lepikhin et al. 2020) and DeepSpeed-MoE (Rajbhandari et al. 2022), but nothing is padded and no token is
dropped: each pair of a token and an expert that it visits is a row, rows go to the rank that has the expert by an
all-to-all with split sizes, and the experts' outputs come back by the inverse one. Rows are sorted by expert, and those
of one expert by the rank and the order in which they come from it, so that every sum has one order whatever arrives
first. A rank whose experts no token visits computes with no rows and takes part all the same.

The host waits once a layer and forward, for the sizes of the exchange. A recomputed layer keeps them, and the
routing, whatever it recomputes: neither is exchanged or waited for again."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
from transformers.distributed.tensor_parallel import TensorParallelLayer

from dhp.core.errors import ModelError
from dhp.core.wrapping import wrap_forward
from dhp.parallel.comm import AllToAll, exchange_rows
from dhp.parallel.expert.expert_modules import Groups, experts_of, run_experts
from dhp.parallel.recompute.recomputed_layers import VISITS
from dhp.parallel.recompute.saved_tensors import save_output

ReadPlan = Callable[[nn.Module, Mapping[str, str]], dict[str, str]]
# Rows sorted by own expert, and which are whose → the experts' outputs.
Compute = Callable[[Tensor, Groups], Tensor]


@dataclass(frozen=True)
class Visits:
    """The routing of one rank's rows.

    order: the pairs of a token and an expert (token × visits + number of the visit) in the order in which they are
    sent. send, receive: rows for and from each rank. by_expert: of the rows received, which come one behind another
    when they are sorted by own expert. groups: the rows of each own expert."""

    order: Tensor
    send: list[int]
    receive: list[int]
    by_expert: Tensor
    groups: Groups


def find_visits(visited: Tensor, experts: int, group: dist.ProcessGroup) -> Visits:
    """visited: the experts of each token, int64 [tokens, visits], numbered through all of the group's, of which each
    rank has `experts`. The ranks exchange how many rows come; the host waits for the answer."""
    ranks = dist.get_world_size(group)
    pairs = visited.flatten()
    order = torch.argsort(pairs, stable=True)
    going = count_visits(pairs, ranks * experts).view(ranks, experts)
    coming = exchange_rows(going, [1] * ranks, [1] * ranks, group)
    leaving, arriving = torch.stack([going, coming]).tolist()  # [ranks][experts]: the one time that the host waits
    send, receive = ([sum(of_rank) for of_rank in rows] for rows in (leaving, arriving))
    numbers = torch.arange(experts, device=visited.device).repeat(ranks)
    own = numbers.repeat_interleave(coming.flatten(), output_size=sum(receive))
    counts = [sum(of_expert) for of_expert in zip(*arriving, strict=True)]
    ends = coming.sum(0).cumsum(0, dtype=torch.int32)
    return Visits(order, send, receive, torch.argsort(own, stable=True), Groups(counts, ends))


def count_visits(pairs: Tensor, experts: int) -> Tensor:
    """Counts each of the numbers below `experts` in `pairs`, int64 [experts]. `torch.bincount` makes the host
    wait for the least and the largest of them."""
    return pairs.new_zeros(experts).index_add_(0, pairs, torch.ones_like(pairs))


_find_visits_once = save_output(VISITS, find_visits)


def visit(states: Tensor, visited: Tensor, weights: Tensor, experts: int, group: Any, compute: Compute) -> Tensor:
    """Σ over the experts that a token visits of weight × output, [tokens, hidden].

    states: [tokens, hidden]; visited, weights: [tokens, visits]; experts: how many this rank has; compute: what they
    make of rows. All ranks of the group call it together, forward and backward."""
    if torch.is_grad_enabled() and not states.requires_grad:
        # Others may have states that need a gradient, and all have to take part in backward.
        states = states.detach().requires_grad_()
    visits = _find_visits_once(visited, experts, group)
    sent = Gather.apply(states, visits.order, visited.shape[1])
    received = AllToAll.apply(sent, visits.send, visits.receive, group)
    output = compute(Permute.apply(received, visits.by_expert), visits.groups)
    answer = Permute.apply(output, inverse(visits.by_expert))
    returned = Permute.apply(AllToAll.apply(answer, visits.receive, visits.send, group), inverse(visits.order))
    of_tokens = returned.view(*visited.shape, states.shape[1]) * weights[..., None].to(returned.dtype)
    return of_tokens.sum(dim=1).to(states.dtype)


def inverse(order: Tensor) -> Tensor:
    """The permutation that undoes `order`."""
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return back


class Permute(torch.autograd.Function):
    """Rows in another order. Backward takes them by the inverse order, where that of indexing would add them up."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(order)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return grad.index_select(0, inverse(order)), None


class Gather(torch.autograd.Function):
    """The row of its token for each pair, [pairs, hidden]. Backward sums a token's pairs in the order of its visits."""

    @staticmethod
    def forward(ctx: Any, states: Tensor, order: Tensor, visits: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.shape = (len(states), visits, states.shape[1])
        return states.index_select(0, order // visits)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (order,) = ctx.saved_tensors
        return grad.index_select(0, inverse(order)).view(ctx.shape).sum(dim=1), None, None


SUMMED_OVER = "dhp_summed_over"  # on a module: the mesh of ranks over which gradients of its parameters are summed
READ_OVER = "dhp_read_over"  # on a module of experts: the mesh whose ranks read shares of it, if not the plan's
SHARE = "dhp_experts_share"


class Share(TensorParallelLayer):
    """Some experts of a layer, whole: a rank reads those alone."""

    def shard_param(self, module: nn.Module, param: str, mesh: DeviceMesh) -> None:
        """Give this rank its share along the dimension of experts: of a mesh of two dimensions, the second shares out
        what the first leaves. Where these are too few for each rank to have one, each has all of them: the library
        cannot read none."""
        whole, shared = module.get_parameter(param), module.__dict__.get(READ_OVER, mesh)
        count, ranks = len(whole) // prod(shared.shape[:-1]), shared.shape[-1]
        last = Shard(0) if -(-count // ranks) * (ranks - 1) < count else Replicate()
        share = distribute_tensor(whole, shared, [*[Shard(0)] * (shared.ndim - 1), last], src_data_rank=None)
        module.register_parameter(param, nn.Parameter(share, whole.requires_grad))

    def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """The forward stays: `share_out` or `cut_widths` sets it later."""
        return module


ALL_PARALLEL_STYLES.register(SHARE, Share())


def share_plan(model: nn.Module, _: Mapping[str, str]) -> dict[str, str]:
    """The plan by which each rank reads its experts, and all of everything else: style by parameter."""
    return {
        f"{name}.{own}": SHARE for name, experts in experts_of(model).items() for own, _ in experts.named_parameters()
    }


def read_over(mesh: DeviceMesh, read_plan: ReadPlan) -> ReadPlan:
    """What reads a plan as `read_plan` does, and of experts lets each rank of `mesh` read a share."""

    def read(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
        for experts in experts_of(model).values():
            setattr(experts, READ_OVER, mesh)
        return read_plan(model, plan) | share_plan(model, plan)

    return read


def check_shares(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """`share_plan` of a whole decoder. Raises ModelError where it has no experts that are known here."""
    found = share_plan(model, plan)
    if not found:
        raise ModelError(
            f"text.expert: {type(model).__name__} has no modules of experts known here, those with transformers' "
            "@use_experts_implementation. Set text.expert=1"
        )
    return found


def share_out(model: nn.Module, group: dist.ProcessGroup, copies: DeviceMesh) -> None:
    """Let a model that was read by `share_plan` send tokens to the ranks of `group` that hold their experts.

    copies: the ranks that hold the same experts as this one, over which their gradients are summed."""
    for experts in experts_of(model).values():
        setattr(experts, SUMMED_OVER, copies)
        _visit_group(experts, group)


def _visit_group(experts: nn.Module, group: dist.ProcessGroup) -> None:
    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        compute = lambda rows, groups: run_experts(experts, rows, groups)
        held = next(experts.parameters()).shape[0]
        return visit(hidden_states, top_k_index, top_k_weights, held, group, compute)

    wrap_forward(experts, forward, __name__)


def summed_over(model: nn.Module) -> dict[int, DeviceMesh]:
    """By a parameter's id, the ranks that hold the same values of it, where these are not all replicas: over them its
    gradients are summed and its states cut."""
    found = {}
    for module in model.modules():
        mesh = module.__dict__.get(SUMMED_OVER)
        for parameter in module.parameters(recurse=False) if mesh is not None else ():
            found[id(parameter)] = mesh
    return found
