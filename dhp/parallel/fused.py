"""Elementwise work of a layer in one kernel instead of many, on GPUs: norms, and the gate of an MLP.

Written out in float32 pieces, norms, gates and their backward move ten times the bytes that they must. A replacement is
put in only where it is proved at start, on the very device and number format, to give what the module's own code gives,
forward and backward; otherwise the module stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from dhp.parallel.comm.collectives import largest_in_place

PROVED = 2.5  # a replacement may deviate from double precision so many times as much as the module's own code
_ROWS, _WIDTH = 64, 256  # of the states of a trial


def fuse_elementwise(
    model: nn.Module, device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup
) -> dict[str, int]:
    """Replace the forward of RMS norms and gated MLPs of `model` where that is proved; how many of each kind.

    group: all ranks of the part, of which all replace the same or none: what they hold alike must stay alike. Nothing
    on CPUs, where there are no such kernels. Parameters, names and hooks stay.
    """
    if device.type != "cuda":
        return {}
    wanted: dict[str, list[tuple[nn.Module, Callable[..., Tensor]]]] = {}
    for module in model.modules():
        for kind, replacement in (("norm", _norm_of(module)), ("gate", _gate_of(module))):
            if replacement is not None:
                wanted.setdefault(f"{kind} of {type(module).__name__}", []).append((module, replacement))
    proved = [_is_proved(kind, found[0][0], device, dtype) for kind, found in wanted.items()]
    counts = {}
    for (kind, found), agreed in zip(wanted.items(), _agree(proved, device, group), strict=True):
        if agreed:
            counts[kind] = len(found)
            for module, replacement in found:
                module.forward = replacement
    return counts


def _agree(proved: Sequence[bool], device: torch.device, group: dist.ProcessGroup) -> list[bool]:
    """Which are proved on all ranks. All of them together."""
    refused = torch.tensor([0.0 if one else 1.0 for one in proved], device=device)
    return [not refuses for refuses in largest_in_place(refused, group).tolist()] if proved else []


def _norm_of(module: nn.Module) -> Callable[..., Tensor] | None:
    """torch's fused norm in place of an RMS norm's forward; None for another module."""
    eps = getattr(module, "variance_epsilon", None)
    own = dict(module.named_parameters(recurse=False))
    if eps is None or set(own) != {"weight"} or not type(module).__name__.endswith("RMSNorm"):
        return None
    return lambda states: F.rms_norm(states, module.weight.shape, module.weight, eps)


def _gate_of(module: nn.Module) -> Callable[..., Tensor] | None:
    """A gated MLP's forward with one kernel between its matrices; None for another module. Whether there is a compiler
    for it is no matter here: nodes may differ in that, and all ranks have to name the same kernels to agree on them."""
    named = dict(module.named_children())
    if not {"gate_proj", "up_proj", "down_proj", "act_fn"} <= named.keys() or not _is_silu(named["act_fn"]):
        return None
    return lambda states: module.down_proj(_compiled_gate()(module.gate_proj(states), module.up_proj(states)))


def _is_silu(act: Any) -> bool:
    values = torch.linspace(-3, 3, 7)
    return bool(torch.allclose(act(values), F.silu(values)))


@cache
def _compiled_gate() -> Callable[[Tensor, Tensor], Tensor] | None:
    if find_spec("triton") is None:  # what torch.compile makes kernels with on GPUs
        return None
    return torch.compile(lambda gate, up: F.silu(gate) * up, dynamic=True)


def _is_proved(kind: str, module: nn.Module, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernel is as near to double precision as what `module` does in its place. Without matrices, and so
    without collectives: a rank on which it fails must not leave others waiting."""
    try:
        if kind.startswith("norm"):
            return _compare(_norm_of(module), module.forward, [module.weight], device, dtype)
        if _compiled_gate() is None:
            return False
        plain = lambda gate, up: F.silu(gate) * up
        return _compare(_compiled_gate(), plain, [torch.ones(_WIDTH)], device, dtype)
    except Exception as error:
        print(f"{kind}: no fused kernel ({type(error).__name__}: {str(error)[:200]})", flush=True)
        return False


def _compare(
    ours: Callable[..., Tensor],
    own: Callable[..., Tensor],
    weights: Sequence[Tensor],
    device: torch.device,
    dtype: torch.dtype,
) -> bool:
    """Outputs and gradients of `ours` and `own`, of random states as wide as the weight. A norm's weight, a parameter,
    takes part in its format of the moment; for a gate it tells the width alone."""
    (weight,) = weights
    random = torch.Generator().manual_seed(0)
    states, others, slopes = (torch.randn(_ROWS, weight.shape[-1], generator=random).to(device) for _ in range(3))
    leaves = [states] if isinstance(weight, nn.Parameter) else [states, others]
    exact = _run(own, leaves, slopes, weight, torch.float64)
    rough, fused = (_run(one, leaves, slopes, weight, dtype) for one in (own, ours))
    floor = torch.finfo(dtype).eps
    return all(
        float((f.double() - e).norm()) <= PROVED * max(float((r.double() - e).norm()), floor * float(e.norm()))
        for f, r, e in zip(fused, rough, exact, strict=True)
    )


def _run(
    forward: Callable[..., Tensor], states: Sequence[Tensor], slopes: Tensor, weight: Tensor, dtype: torch.dtype
) -> Sequence[Tensor]:
    """Output and gradients of the states and of the weight, if it is one, which is put into `dtype` meanwhile."""
    leaves = [state.detach().to(dtype).requires_grad_() for state in states]
    trained = [weight] if isinstance(weight, nn.Parameter) else []
    kept = [parameter.data for parameter in trained]
    try:
        for parameter in trained:
            parameter.data = parameter.data.to(slopes.device, dtype)
        output = forward(*leaves)
        return [output.detach(), *torch.autograd.grad(output, [*leaves, *trained], slopes.to(dtype))]
    finally:
        for parameter, data in zip(trained, kept, strict=True):
            parameter.data = data
