"""16-bit training: what computes is 16 bits wide, what accumulates is not.

Weights are widened to float32 and kept so by the optimizer (master weights, Micikevicius et al. 2018, section 3.1);
the module computes with a rounded copy. Buffers are left alone: rounding RoPE's frequencies to bfloat16 turns the
positions of long sequences by up to a radian.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.tensor import DTensor

_EXACT = {torch.bfloat16: torch.float32, torch.float32: torch.float32, torch.float64: torch.float64}


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """The format of master weights, gradient sums and optimizer state for a module that computes in `dtype`."""
    return _EXACT[dtype]


def widen(module: nn.Module, dtype: torch.dtype) -> None:
    """Put parameters that are whole, or plain slices, into `dtype`, that of master weights, in place. Those that
    FSDP2 has cut are so already."""
    for parameter in module.parameters():
        if parameter.is_floating_point() and not isinstance(parameter, DTensor):
            parameter.data = parameter.data.to(dtype)


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Put parameters of `dtype` in place of the module's own, which stay as they are for callers that hold them.

    A parameter that two modules share stays shared. Buffers keep their format, and so do parameters that the model's
    class says must not be rounded to 16 bits (routers of some families, whose code multiplies in float32). What is kept
    in fewer bits is no number of its own and stays as it is.
    """
    kept = tuple(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
    cast: dict[int, nn.Parameter] = {}
    for path, owner in module.named_modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            exact = any(pattern in f"{path}.{name}" for pattern in kept)
            if not parameter.is_floating_point():
                continue
            if id(parameter) not in cast:
                copy = parameter.detach().clone() if exact else parameter.detach().to(dtype)
                cast[id(parameter)] = nn.Parameter(copy, parameter.requires_grad)
            setattr(owner, name, cast[id(parameter)])
