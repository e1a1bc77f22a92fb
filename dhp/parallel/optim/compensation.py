"""A float32 master weight as two halves: the bfloat16 weight that the module computes with, and 16 bits more.

As Split-SGD-BF16 (Kalamkar et al. 2020), but that the weight is the master weight rounded to nearest, not cut off: it
lacks a whole number of the master weight's last places, from -2¹⁵ to 2¹⁵ - 1. Both together are the master weight, bit
by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from dhp.core.state_forms import COMPENSATION, MASTER

_HALF = 1 << 15  # half of the last place of a bfloat16 number, in last places of a float32 one


def split_master(master: Tensor) -> tuple[Tensor, Tensor]:
    """The bfloat16 weight nearest to each finite float32 number, of two equally near ones the larger in magnitude, and
    as int16 what `join_master` adds to it."""
    bits = master.contiguous().view(torch.int32)
    upper = (bits + _HALF) >> 16
    return upper.to(torch.int16).view(torch.bfloat16), (bits - (upper << 16)).to(torch.int16)


def join_master(weight: Tensor, compensation: Tensor) -> Tensor:
    """The float32 numbers of which `split_master` made these."""
    upper = weight.contiguous().view(torch.int16).to(torch.int32) << 16
    return (upper + compensation.to(torch.int32)).view(torch.float32)


def saved_master(name: str, weight: Tensor, saved: Collection[str], read: Callable[[str], Tensor]) -> Tensor | None:
    """The master weight of a parameter in a checkpoint of any form: saved itself, or as a compensation of the weight.
    None: it has neither, for its weights are not rounded; what was made of them holds.

    weight: of the same checkpoint, in any format. saved: names of all that is in it. read: returns what has a name.
    """
    if f"{name}.{COMPENSATION}" in saved:
        return join_master(weight.to(torch.bfloat16), read(f"{name}.{COMPENSATION}").to(weight.device))
    if f"{name}.{MASTER}" in saved:
        return read(f"{name}.{MASTER}").to(weight.device)
    return None
