"""Maps transformers' tensor-parallel plans to exact styles."""

from collections import defaultdict
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dhp.core.errors import ModelError, PartFailed
from dhp.parallel.comm import gather_alike
from dhp.parallel.expert.expert_modules import is_experts, require_known
from dhp.parallel.expert.expert_shares import SHARE
from dhp.parallel.tensor.slices import cut_of, owned_parameters
from dhp.parallel.tensor.styles import (
    COLWISE,
    EMBEDDING,
    HEAD,
    PART,
    ROWWISE,
    WHOLE,
    fused_style,
    name_style,
    share_entry,
)

GATHERED, SPLIT_INPUT, GATE_UP = "colwise_gather_output", "rowwise_split_input", "gate_up_proj"

# transformers' style → ours. The head's is for the head alone, whose logits are not gathered.
OURS = {
    "colwise": COLWISE,
    "rowwise": ROWWISE,
    "embedding_rowwise": EMBEDDING,
    "replicated_with_grad_allreduce": PART,
    "colwise_gather_output": HEAD,
    "colwise_rep": HEAD,
}
EXPERTS = (
    "moe_tp_experts"  # of modules of experts alone; what the library's plan says of their parameters is passed over
)
# Known by name, and not built: what gradients they give here is not tested.
REFUSED = frozenset({
    "all_reduce",
    "embedding_colwise",
    "ep_dispatch_experts",
    "grouped_gemm",
    "local_params",
    "mla_kv_a_proj",
    "moe_identity_expert",
    "moe_tp_experts",
    "packed_colwise",
    "packed_rowwise",
    "replicate",
    "rowwise_rep",
    "rowwise_split_input",
    "sequence_parallel",
})  # fmt: skip
_CUTS_OUTPUTS = (
    "dhp_colwise",
    "dhp_fused_",
    "dhp_shared_query",
    "dhp_shared_key",
)  # what such a module's siblings see is cut


def local_plan(model: nn.Module, plan: Mapping[str, str]) -> dict[str, str]:
    """`plan` (style by the full name of a module or parameter) with our styles for the library's.

    Experts are read by shares, for `dhp.parallel.tensor.slices` to cut. Projections that stand side by side
    will enter their input together. Raises ModelError for a style whose gradients are not known to be exact, and for
    a parameter next to cut projections that the plan does not name: each rank would hold another part of its gradient,
    and they would not be summed."""
    head, modules = _head_names(model), dict(model.named_modules())
    plan = _without_gathering(plan, head)
    experts = [name for name, style in plan.items() if style == EXPERTS and is_experts(modules.get(name, model))]
    ours = {n: _ours(n, s, head) for n, s in plan.items() if n.rpartition(".")[0] not in experts and n not in experts}
    for name in experts:
        require_known(name, modules[name])
        ours |= {f"{name}.{own}": SHARE for own, _ in modules[name].named_parameters()}  # `cut_widths` does the rest
    siblings: dict[str, list[nn.Module]] = defaultdict(list)
    for name, style in ours.items():
        if name in modules:
            name_style(modules[name], style)
        if name in modules and style.startswith(_CUTS_OUTPUTS):
            siblings[name.rpartition(".")[0]].append(modules[name])
    for parent, members in siblings.items():
        _refuse_unnamed(parent, modules[parent], ours)
        share_entry(members)
    return ours


def _without_gathering(plan: Mapping[str, str], head: set[str]) -> dict[str, str]:
    """The plan without outputs that are cut and gathered at once. Gate and up in one matrix are each cut, so that down
    takes what it needs from its own rank; any other such matrix stays whole on every rank, whose work it was anyhow."""
    changed = dict(plan)
    for name, style in plan.items():
        if style != GATHERED or name in head:
            continue
        down = plan.get(name.replace(GATE_UP, "down_proj"))
        if GATE_UP in name and down == SPLIT_INPUT:
            changed[name] = fused_style(2)
            changed[name.replace(GATE_UP, "down_proj")] = "rowwise"
        else:
            changed[name] = WHOLE
    return changed


def _ours(name: str, style: str, head: set[str]) -> str:
    if style.startswith("dhp_"):
        return style
    ours = OURS.get(style)
    if ours is None or (ours == HEAD) != (name in head):
        raise ModelError(
            f"tensor parallelism: the plan of this model has style {style!r} for {name}, and whether its "
            f"gradients are exact in training is not known here (known: {', '.join(sorted(OURS))}, of which "
            "colwise_gather_output and colwise_rep for the head). Set text.parallelism=data or deepspeed with a "
            "zero_stage, and tensor=1"
        )
    return ours


def _head_names(model: nn.Module) -> set[str]:
    try:
        head = model.get_output_embeddings()
    except AttributeError:  # some ask the decoder for it, which an encoder's rank has not
        return set()
    found = [name for name, module in model.named_modules() if module is head and head is not None]
    return {*found, *(f"{name}.{own}" for name in found for own in ("weight", "bias"))}


def _refuse_unnamed(parent: str, module: nn.Module, plan: Mapping[str, str]) -> None:
    for name, _ in module.named_parameters(prefix=parent):
        if name not in plan and name.rpartition(".")[0] not in plan:
            raise ModelError(
                f"tensor parallelism: the plan of this model cuts projections of {parent} and does not say what "
                f"becomes of {name} beside them; if it sees one rank's heads, each rank has another part of its "
                "gradient. Set text.parallelism=data or deepspeed with a zero_stage, and tensor=1, or name it in the "
                "family's plan"
            )


_CHUNK = 1 << 22  # values that are widened at a time
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def require_alike(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Compare 64-bit hashes of the parameters that every rank of `group` holds whole. All its ranks together.

    Raises PartFailed, on each of them, with the names of those that differ."""
    if dist.get_world_size(group) == 1:
        return
    held = {
        name: owner.get_parameter(own) for name, owner, own in owned_parameters(model) if cut_of(owner, own) is None
    }
    if not held:
        return
    own = torch.stack([hash_bits(parameter.detach()) for parameter in held.values()])
    of_ranks = gather_alike(own, group)
    differing = (of_ranks != of_ranks[0]).any(0).tolist()
    names = [name for name, differs in zip(held, differing, strict=True) if differs]
    if names:
        more = f" and {len(names) - 5} more" if len(names) > 5 else ""
        raise PartFailed(
            f"tensor ranks no longer hold the same {', '.join(names[:5])}{more}: each computes the same updates of "
            "what none of them cuts, so a device or a kernel gave differing results. Nothing was saved; go on from the "
            "last checkpoint, on other devices if it comes again, and please report the layout"
        )


def hash_bits(tensor: Tensor) -> Tensor:
    """64 bits of all of a tensor's bits and their order, a scalar int64 on its device."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    bits = local.contiguous().view(_INTEGERS[local.dtype.itemsize]).flatten()
    total = torch.full((), len(bits), dtype=torch.int64, device=bits.device)
    for number, chunk in enumerate(bits.split(_CHUNK)):
        # Odd factors: by an even one, the sign of a float64 would be lost modulo 2^64.
        places = torch.arange(len(chunk), device=bits.device) * 2 + 1 + 2 * number * _CHUNK
        total += (chunk.long() * (places * 0x9E3779B97F4A7C1)).sum()
    return total
