"""16-bit training: what computes is 16 bits wide, what accumulates is not.

Weights are loaded in float32 and kept so by the optimizer (master weights, Micikevicius et al. 2018, section 3.1);
the module computes with a rounded copy. Buffers are left alone: rounding RoPE's frequencies to bfloat16 turns the
positions of long sequences by up to a radian.
"""

from __future__ import annotations

import torch
from torch import nn

_EXACT = {torch.bfloat16: torch.float32, torch.float32: torch.float32, torch.float64: torch.float64}


def exact_dtype(dtype: torch.dtype) -> torch.dtype:
    """The format of master weights, gradient sums and optimizer state for a module that computes in `dtype`."""
    return _EXACT[dtype]


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Put parameters of `dtype` in place of the module's own, which stay as they are for whoever holds them.

    A parameter that two modules share stays shared. Buffers keep their format.
    """
    cast: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            if id(parameter) not in cast:
                cast[id(parameter)] = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
            setattr(owner, name, cast[id(parameter)])
