"""Fused functions, each counted as one kernel forward and one backward that move their operands once.

The registry says which operands those are. A function of dhp's that fuses more work gets a line in OURS: its dotted
name, and which of its arguments it reads and writes, as its own code says. What only a compiler would fuse, the sum
before a norm, is told apart from all others as *assumed*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from experiments.roofline.costs import Costs

NONE, NORMS_AND_GATES, WRITTEN, COMPILED, ALL = CHOICES = ("none", "norms and gates", "written", "compiled", "all")
KERNELS = {
    NONE: "norm:plain,rotary:plain,gate:plain",
    NORMS_AND_GATES: "rotary:plain",
    WRITTEN: "norm:torch,rotary:written,gate:plain",
    COMPILED: "auto",
    ALL: "auto",
}


@dataclass(frozen=True)
class Fused:
    """A function of tensors. target: its dotted name. Forward reads all tensors among its arguments, of which those
    given by name come behind the others, and writes outputs like those numbered `outputs`. Backward reads the outputs'
    gradients and the arguments numbered `again`, and writes gradients of those numbered `slopes`.

    made: the target makes the function, with any arguments. name: of its kernels. takes: an operation that makes the
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


NORM = Fused("norm", "torch.nn.functional.rms_norm", outputs=(0,), again=(0, 2), slopes=(0, 2))
OURS = (
    NORM,
    Fused("gate", "dhp.parallel.kernels.elementwise._compiled", outputs=(0,), again=(0, 1), slopes=(0, 1), made=True),
    # dhp calls it once forward and once backward, each time without autograd.
    Fused("rotary", "dhp.parallel.kernels.rotary._compiled", outputs=(0,), again=(), slopes=(), made=True),
)


def keys(choice: str) -> list[str]:
    """The configuration of both parts."""
    return [f"{part}.kernels='{KERNELS[choice]}'" for part in ("vision", "text")]


def stand_ins(costs: Costs, choice: str) -> dict[str, Callable[..., Any]]:
    """In the place of each fused function, by its dotted name: one that moves its operands once and books that."""
    found: dict[str, Callable[..., Any]] = {"torch.compile": _refuse}
    if choice not in (NONE, WRITTEN):
        found["dhp.parallel.kernels.replace._can_compile"] = lambda: True
    for one in () if choice == NONE else OURS:
        function = _once(replace(one, takes="add") if choice == ALL and one is NORM else one, costs)
        found[one.target] = _maker(function) if one.made else function
    return found


def _maker(function: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    return lambda *_: function


def _refuse(function: Any = None, **_: Any) -> Any:
    raise NotImplementedError(
        f"torch.compile({function}) has nothing to compile here: write the function that calls it into OURS of "
        "experiments/roofline/fused.py, with the operands that it moves"
    )


def _once(one: Fused, costs: Costs) -> Callable[..., Any]:
    def call(*arguments: Any, **named: Any) -> Any:
        result = _Moved.apply(one, costs, *arguments, *named.values())
        return result if len(one.outputs) > 1 else result[0]

    return call


class _Moved(torch.autograd.Function):
    """Any fused function: outputs without values, and what a kernel would move."""

    @staticmethod
    def forward(ctx: Any, one: Fused, costs: Costs, *arguments: Any) -> tuple[Tensor, ...]:
        outputs = tuple(torch.empty_like(arguments[number]) for number in one.outputs)
        ctx.spared = bool(one.takes and costs.launched and costs.launched[-1].name == one.takes)
        if ctx.spared:
            costs.save(f"{one.takes} + {one.name}", [arguments[0]])
        costs.book(one.name, _tensors(arguments), outputs)
        ctx.save_for_backward(*(arguments[number] for number in one.again))
        ctx.like = [(arguments[number].shape, arguments[number].dtype) for number in one.slopes]
        ctx.told = one, costs, len(arguments)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        one, costs, count = ctx.told
        slopes = [torch.empty(shape, dtype=dtype, device="cuda") for shape, dtype in ctx.like]
        costs.book(f"{one.name} backward", [*gradients, *ctx.saved_tensors], slopes)
        if ctx.spared:
            costs.save(f"{one.takes} + {one.name} backward", [slopes[0], slopes[0]])
        found: list[Tensor | None] = [None] * count
        for number, slope in zip(one.slopes, slopes, strict=True):
            found[number] = slope
        return None, None, *found


def _tensors(arguments: Sequence[Any]) -> Iterator[Tensor]:
    return (argument for argument in arguments if isinstance(argument, Tensor))
