"""Products of gated MLPs at widths that a GPU multiplies fast."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from dhp.config.rules import AUTO, PADDED
from dhp.core.reports import KernelUse
from dhp.core.wrapping import wrap_forward
from dhp.parallel.kernels.elementwise import Trial, is_gated, is_proved, random_states

MULTIPLE = 64
_ALIGNED_BYTES = 16  # of a row, without which neither bulk copies nor the widest products of matrix units serve
_PADDING = "dhp_padding"  # on a linear layer: rows and columns of zeros, and the model's `_Zeros`
_Zeros = dict[tuple[Any, ...], Tensor]  # of a model: by kind, a weight and zeros behind it
_OUTPUTS, _INPUTS = ("gate_proj", "up_proj"), ("down_proj",)


def pad_gated_mlps(
    model: nn.Module, device: torch.device, dtype: torch.dtype, wanted: Mapping[str, str]
) -> tuple[KernelUse, ...]:
    """Let gated MLPs compute with zeros up to a width of `MULTIPLE`: on GPUs where their rows are not aligned, or
    where `wanted` has mlp:padded.

    An activation times 0 is 0, so outputs and gradients are the same sums with zeros added. Weights, gradients,
    optimizer and checkpoints have the model's own width; a product copies its weight between zeros that stay when it
    runs. MLPs with adapters,
    with quantized weights, or with gate and up in one matrix stay as they are."""
    kind = wanted.get("mlp", AUTO)
    slow = device.type == "cuda" and kind == AUTO
    found = [
        module
        for module, width in _gated(model)
        if width % MULTIPLE and (kind == PADDED or slow and width * dtype.itemsize % _ALIGNED_BYTES)
    ]
    if not found or not _is_proved(device, dtype):
        return ()
    zeros: _Zeros = {}
    for module in found:
        rows = -module.gate_proj.weight.shape[0] % MULTIPLE
        for name in _OUTPUTS:
            _pad(getattr(module, name), rows, 0, zeros)
        for name in _INPUTS:
            _pad(getattr(module, name), 0, rows, zeros)
    return (KernelUse("mlp", PADDED, len(found)),)


def product(module: nn.Linear, states: Tensor, bias: Tensor | None) -> Tensor:
    """states [..., in] times the layer's weight, plus `bias`: [..., out], each with the layer's padding."""
    padding = vars(module).get(_PADDING)
    if padding is None:
        return F.linear(states, module.weight, bias)
    return cast(Tensor, _Padded.apply(states, module.weight, bias, *padding))


def _gated(model: nn.Module) -> Iterator[tuple[Any, int]]:
    for module in model.modules():
        own = [getattr(module, name, None) for name in (*_OUTPUTS, *_INPUTS)]
        if is_gated(module) and all(type(one) is nn.Linear and one.weight.is_floating_point() for one in own):
            yield module, cast(nn.Linear, own[0]).weight.shape[0]


def _pad(module: nn.Linear, rows: int, columns: int, zeros: _Zeros) -> None:
    setattr(module, _PADDING, (rows, columns, zeros))
    if "forward" not in vars(module):  # one that was replaced goes through `product` already
        wrap_forward(module, lambda states: product(module, states, module.bias), __name__)


class _Padded(torch.autograd.Function):
    """Saves the weight without its padding, which would be another copy of it until backward."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, rows: int, columns: int, zeros: _Zeros
    ) -> Tensor:
        ctx.save_for_backward(states, weight)
        ctx.padding = rows, columns, zeros
        wide = None if bias is None else _padded(zeros, bias, rows)
        return F.linear(states, _padded(zeros, weight, rows, columns), wide)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        (states, weight), (rows, columns, zeros) = ctx.saved_tensors, ctx.padding
        of_states, of_weight, of_bias = ctx.needs_input_grad[:3]
        flat = gradient.flatten(0, -2)
        into_states = gradient @ _padded(zeros, weight, rows, columns) if of_states else None
        into_weight = (flat.T @ states.flatten(0, -2))[: weight.shape[0], : weight.shape[1]] if of_weight else None
        into_bias = flat.sum(0)[: weight.shape[0]] if of_bias else None
        return into_states, into_weight, into_bias, None, None, None


def _padded(kept: _Zeros, weight: Tensor, *more: int) -> Tensor:
    """The weight with `more` zeros behind each axis, until the next of that shape is asked for: on one stream the
    product that it is for has begun by then."""
    if torch.compiler.is_compiling():  # which copies and pads in one kernel
        return F.pad(weight, [number for zeros in reversed(more) for number in (0, zeros)])
    key = weight.shape, more, weight.dtype
    if key not in kept:
        shape = [length + zeros for length, zeros in zip(weight.shape, more, strict=True)]
        with torch.inference_mode(False):  # what is made in it may not be written to behind it
            kept[key] = torch.zeros(shape, dtype=weight.dtype, device=weight.device)
    kept[key][tuple(map(slice, weight.shape))] = weight
    return kept[key]


def _is_proved(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether both kinds of products give on this device what the plain ones give."""
    states = random_states((96, 44), (44, 44), (44,))

    def ours(rows: int, columns: int, states: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return cast(Tensor, _Padded.apply(F.pad(states, (0, columns)), weight, bias, rows, columns, {}))[..., :44]

    return all(
        is_proved(Trial(F.linear, partial(ours, *padding), states), device, dtype) for padding in ((20, 0), (0, 20))
    )
