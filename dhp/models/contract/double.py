"""Keeps float64 where a model asks for float32."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Function = Callable[..., Any]
# Functions to replace, by owner. Not a mode of torch's: backward, which runs layers again, would be outside of it.
_CASTS = ((Tensor, ("to", "type", "float")),)
_TAKE_DTYPE = ((F, ("softmax",)), (torch, ("softmax", "sum", "zeros_like")), (Tensor, ("softmax", "sum", "new_zeros")))
_PRODUCTS = ((torch, ("matmul", "bmm")), (Tensor, ("matmul", "__matmul__")), (F, ("linear", "grid_sample")))


@contextmanager
def staying_double() -> Iterator[None]:
    """Keep float64 where a model asks for float32, as norms, softmax and rotary positions do: rounding there jumps by
    1e-7 for a difference of 1e-16, and would hide what is compared."""
    kept: list[tuple[Any, str, Function]] = []
    groups = (
        (_CASTS, _stay),
        (_TAKE_DTYPE, _without_dtype),
        (_PRODUCTS, _widened),
        (((Tensor, ("__setitem__",)),), _fitted),
    )
    try:
        for owners, change in groups:
            for owner, names in owners:
                for name in names:
                    kept.append((owner, name, getattr(owner, name)))
                    setattr(owner, name, change(getattr(owner, name)))
        yield
    finally:
        for owner, name, function in reversed(kept):
            setattr(owner, name, function)


def _stay(cast: Function) -> Function:
    @wraps(cast)
    def run(states: Tensor, *args: Any, **named: Any) -> Any:
        single = cast.__name__ == "float" or torch.float32 in args or named.get("dtype") == torch.float32
        return states if single and states.dtype == torch.float64 else cast(states, *args, **named)

    return run


def _without_dtype(function: Function) -> Function:
    @wraps(function)
    def run(states: Any, *args: Any, **named: Any) -> Any:
        if _is(torch.float64, states) and named.get("dtype") == torch.float32:
            named.pop("dtype")
        return function(states, *args, **named)

    return run


def _widened(product: Function) -> Function:
    @wraps(product)
    def run(*args: Any, **named: Any) -> Any:
        if any(_is(torch.float64, one) for one in args):
            args = tuple(one.double() if _is(torch.float32, one) else one for one in args)
        return product(*args, **named)

    return run


def _fitted(assign: Function) -> Function:
    @wraps(assign)
    def run(states: Tensor, index: Any, value: Any) -> None:
        narrow = _is(torch.float32, states) and _is(torch.float64, value)
        assign(states, index, torch.empty_like(value, dtype=torch.float32).copy_(value) if narrow else value)

    return run


def _is(dtype: torch.dtype, value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == dtype
