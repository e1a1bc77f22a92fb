"""Fused functions, each counted as one kernel forward and one backward that move their operands once.

The registry says which operands those are. A function of dhp's that fuses more work gets a line in OURS: its dotted
name, and which of its arguments it reads and writes, as its own code says. What only a compiler would fuse is in
ASSUMED, and its kernels are told apart from all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from experiments.fake_cuda.stand_ins import Fuses
from experiments.roofline.costs import Costs

NONE, TODAY, ALL = CHOICES = ("none", "today", "all")


@dataclass(frozen=True)
class Fused:
    """A function of tensors. target: its dotted name. Forward reads all tensors among its arguments, of which those
    given by name come behind the others, and writes outputs like those numbered `outputs`. Backward reads the outputs'
    gradients and the arguments numbered `again`, and writes gradients of those numbered `slopes`.

    made: the target makes the function, without arguments. name: of its kernels. takes: an operation that makes the
    first argument, right before, and that a compiler is assumed to put into the same kernel: forward then reads one
    tensor less, and backward does not write and read the gradient that it adds to another one.
    """

    name: str
    target: str
    outputs: tuple[int, ...]
    again: tuple[int, ...]
    slopes: tuple[int, ...]
    made: bool = False
    takes: str = ""


QWEN = "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl"
NORM = Fused("norm", "torch.nn.functional.rms_norm", outputs=(0,), again=(0, 2), slopes=(0, 2))
GATE = Fused("gate", "dhp.parallel.fused._compiled_gate", outputs=(0,), again=(0, 1), slopes=(0, 1), made=True)
OURS = (NORM, GATE)
ASSUMED = (
    Fused("rotary", f"{QWEN}.apply_rotary_pos_emb_vision", outputs=(0, 1), again=(2, 3), slopes=(0, 1)),
    Fused("rotary", f"{QWEN}.apply_rotary_pos_emb", outputs=(0, 1), again=(2, 3), slopes=(0, 1)),
)


def fuses(choice: str) -> Fuses:
    """Which kinds of modules `dhp.parallel.fused` replaces, by the names that it gives them."""
    names = {NONE: (), TODAY: ("norm", "gate"), ALL: None}[choice]
    return lambda kind: names is None or kind.split()[0] in names


def stand_ins(costs: Costs, choice: str) -> dict[str, Callable[..., Any]]:
    """In the place of each fused function, by its dotted name: one that moves its operands once and books that."""
    found: dict[str, Callable[..., Any]] = {"torch.compile": _refuse}
    if choice == NONE:
        return found
    every = [(one, False) for one in OURS]
    if choice == ALL:
        every = [(replace(one, takes="add") if one is NORM else one, False) for one, _ in every]
        every += [(one, True) for one in ASSUMED]
    for one, assumed in every:
        function = _once(one, costs, assumed)
        found[one.target] = _maker(function) if one.made else function
    return found


def _maker(function: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    return lambda: function


def _refuse(function: Any = None, **_: Any) -> Any:
    raise NotImplementedError(
        f"torch.compile({function}) has nothing to compile here: write the function that calls it into OURS of "
        "experiments/roofline/fused.py, with the operands that it moves"
    )


def _once(one: Fused, costs: Costs, assumed: bool) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        result = _Moved.apply(one, costs, assumed, *arguments, *named.values())
        return result if len(one.outputs) > 1 else result[0]

    return call


class _Moved(torch.autograd.Function):
    """Any fused function: outputs without values, and what a kernel would move."""

    @staticmethod
    def forward(ctx: Any, one: Fused, costs: Costs, assumed: bool, *arguments: Any) -> tuple[Tensor, ...]:
        outputs = tuple(torch.empty_like(arguments[number]) for number in one.outputs)
        ctx.spared = bool(one.takes and costs.launched and costs.launched[-1].name == one.takes)
        if ctx.spared:
            costs.save(f"{one.takes} + {one.name}", [arguments[0]])
        costs.book(one.name, _tensors(arguments), outputs, assumed)
        ctx.save_for_backward(*(arguments[number] for number in one.again))
        ctx.like = [(arguments[number].shape, arguments[number].dtype) for number in one.slopes]
        ctx.told = one, costs, assumed, len(arguments)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        one, costs, assumed, count = ctx.told
        slopes = [torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in ctx.like]
        costs.book(f"{one.name} backward", [*gradients, *ctx.saved_tensors], slopes, assumed)
        if ctx.spared:
            costs.save(f"{one.takes} + {one.name} backward", [slopes[0], slopes[0]])
        found: list[Tensor | None] = [None] * count
        for number, slope in zip(one.slopes, slopes, strict=True):
            found[number] = slope
        return None, None, None, *found


def _tensors(arguments: Sequence[Any]) -> Iterator[Tensor]:
    return (argument for argument in arguments if isinstance(argument, Tensor))
