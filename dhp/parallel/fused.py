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
import torch.nn.functional as F
from torch import Tensor, nn

PROVED = 2.5  # times the deviation of the module's own code from double precision that a replacement may have
_ROWS = 64


def fuse_elementwise(model: nn.Module, device: torch.device, dtype: torch.dtype) -> dict[str, int]:
    """Replace the forward of RMS norms and gated MLPs of `model` where that is proved; how many of each kind.

    Nothing on CPUs, where there are no such kernels. Parameters, names and hooks stay.
    """
    if device.type != "cuda":
        return {}
    counts: dict[str, int] = {}
    for module in model.modules():
        for kind, replacement in (("norm", _norm_of(module)), ("gate", _gate_of(module))):
            if replacement is not None and _is_proved(type(module), kind, module, replacement, device, dtype):
                module.forward = replacement
                counts[kind] = counts.get(kind, 0) + 1
    return counts


def _norm_of(module: nn.Module) -> Callable[..., Tensor] | None:
    """torch's fused norm in place of an RMS norm's forward; None for another module."""
    eps = getattr(module, "variance_epsilon", None)
    own = dict(module.named_parameters(recurse=False))
    if eps is None or set(own) != {"weight"} or not type(module).__name__.endswith("RMSNorm"):
        return None
    return lambda states: F.rms_norm(states, module.weight.shape, module.weight, eps)


def _gate_of(module: nn.Module) -> Callable[..., Tensor] | None:
    """A gated MLP's forward with one kernel between its matrices; None for another module, or without a compiler."""
    named = dict(module.named_children())
    if not {"gate_proj", "up_proj", "down_proj", "act_fn"} <= named.keys() or not _is_silu(named["act_fn"]):
        return None
    compiled = _compiled_gate()
    if compiled is None:
        return None
    return lambda states: module.down_proj(compiled(module.gate_proj(states), module.up_proj(states)))


def _is_silu(act: Any) -> bool:
    values = torch.linspace(-3, 3, 7)
    return bool(torch.allclose(act(values), F.silu(values)))


@cache
def _compiled_gate() -> Callable[[Tensor, Tensor], Tensor] | None:
    if find_spec("triton") is None:  # what torch.compile makes kernels with on GPUs
        return None
    return torch.compile(lambda gate, up: F.silu(gate) * up, dynamic=True)


_known: dict[tuple[Any, ...], bool] = {}


def _is_proved(
    kind: type, what: str, module: nn.Module, replacement: Callable[..., Tensor], device: torch.device, dtype: torch.dtype
) -> bool:
    """Whether the replacement is as near to double precision as the module's own forward; once for each class."""
    key = (kind, what, device.type, dtype)
    if key not in _known:
        _known[key] = _compare(module, replacement, device, dtype)
    return _known[key]


def _compare(module: nn.Module, replacement: Callable[..., Tensor], device: torch.device, dtype: torch.dtype) -> bool:
    width = module.weight.shape[-1] if hasattr(module, "weight") else module.gate_proj.weight.shape[1]
    random = torch.Generator().manual_seed(0)
    states, slopes = (torch.randn(_ROWS, width, generator=random).to(device) for _ in range(2))
    try:
        exact = _run(module.forward, module, states.double(), slopes.double())
        own = _run(module.forward, module, states.to(dtype), slopes.to(dtype))
        ours = _run(replacement, module, states.to(dtype), slopes.to(dtype))
    except Exception as error:
        print(f"{type(module).__name__}: no fused kernel ({type(error).__name__}: {str(error).splitlines()[:1]})")
        return False
    floor = torch.finfo(dtype).eps
    return all(
        float((o.double() - e).norm()) <= PROVED * max(float((s.double() - e).norm()), floor * float(e.norm()))
        for o, s, e in zip(ours, own, exact, strict=True)
    )


def _run(forward: Callable[..., Tensor], module: nn.Module, states: Tensor, slopes: Tensor) -> Sequence[Tensor]:
    """Output, gradient of the input and gradients of the parameters, with the module's weights in the states' format."""
    kept = {name: p.data for name, p in module.named_parameters()}
    leaf = states.clone().requires_grad_()
    try:
        for p in module.parameters():
            p.data = p.data.to(states.device, states.dtype)
        output = forward(leaf)
        return [output.detach(), *torch.autograd.grad(output, [leaf, *module.parameters()], slopes)]
    finally:
        for name, p in module.named_parameters():
            p.data = kept[name]
