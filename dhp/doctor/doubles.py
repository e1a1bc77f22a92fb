"""Arithmetic in float64 all through: models that take a detour through float32 stay exact for a while."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


class StayingDouble(TorchFunctionMode):
    """Keeps float64 where it is asked for float32, as norms, softmax and rotary positions do: rounding there jumps by
    1e-7 for a difference of 1e-16, and would hide what is compared."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Tensor) and first.dtype == torch.float64:
            if func is Tensor.float or (
                func in (Tensor.to, Tensor.type) and torch.float32 in (*args[1:], kwargs.get("dtype"))
            ):
                return first
            if func in (F.softmax, torch.softmax, Tensor.softmax, torch.sum, Tensor.sum):
                kwargs = {name: value for name, value in kwargs.items() if value is not torch.float32}
        if func in _OF_ONE_FORMAT and any(_is(torch.float64, one) for one in args):
            args = tuple(one.double() if _is(torch.float32, one) else one for one in args)
        if func is Tensor.__setitem__ and _is(torch.float32, args[0]) and _is(torch.float64, args[2]):
            args = (*args[:2], args[2].type(torch.float32))
        return func(*args, **kwargs)


_OF_ONE_FORMAT = {
    torch.matmul,
    Tensor.matmul,
    Tensor.__matmul__,
    Tensor.__rmatmul__,
    torch.bmm,
    F.linear,
    F.grid_sample,
}


def _is(dtype: torch.dtype, value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == dtype
