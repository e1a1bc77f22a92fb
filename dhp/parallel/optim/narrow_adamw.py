"""AdamW for the forms of states that have 16-bit sums, moments or halves of weights, widened as they are read.

Some rows at a time are widened to float32 and take AdamW's step there (Loshchilov and Hutter 2019, algorithm 2); what
is kept in 16 bits is rounded behind it. Operations are elementary ones, each rounded by itself: fused kernels contract
some of them, as an element's place in a vector decides, and the last bits would depend on how a parameter is cut.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from math import sqrt
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dhp.core.parameters import Group
from dhp.core.state_forms import COMPENSATION, MOMENTS, StateForm
from dhp.parallel.optim.base import STEP, ScalingOptimizer, group_parameters
from dhp.parallel.optim.compensation import join_master, split_master
from dhp.parallel.optim.fsdp_parts import RowBlock
from dhp.parallel.optim.stochastic import draw_halves, draw_key, round_stochastically

CHUNK_ELEMENTS = 1 << 21  # that are in float32 at a time, some 90 MB with all temporaries


class Extent(NamedTuple):
    """Which blocks of a parameter of `shape` the rows of a weight are."""

    shape: tuple[int, ...]
    blocks: Sequence[RowBlock]

    @classmethod
    def whole(cls, weight: Tensor) -> Extent:
        """That of a weight no rank of which has other rows."""
        shape = tuple(_rows_of(weight).shape)
        return cls(shape, [RowBlock(0, shape[0], (0,) * len(shape))])

    def chunks(self, weight: Tensor) -> Iterator[tuple[slice, tuple[int, ...]]]:
        """Rows of the weight, some at a time, and where each chunk begins in the whole parameter."""
        rows = _rows_of(weight)
        each = max(1, CHUNK_ELEMENTS // max(1, rows[:1].numel()))
        for first, count, offset in self.blocks:
            for begin in range(0, count, each):
                taken = slice(first + begin, first + min(begin + each, count))
                yield taken, (offset[0] + begin, *offset[1:])


class Rates(NamedTuple):
    """What a step does with a gradient: `factor` is what it is multiplied by before anything else."""

    factor: float
    learning_rate: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float


class NarrowAdamW(ScalingOptimizer):
    """AdamW of weights in float32, or in bfloat16 with a compensation (`hold_halves`); gradients in any format.

    form: the formats of the moments. seed: of stochastic rounding. extents: by weight, what of a parameter it is; one
    that has none is whole.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], form: StateForm, seed: int):
        super().__init__(groups, {})
        self._formats = {kind: getattr(torch, form.format(kind)) for kind in MOMENTS}
        self._seed = seed
        self.extents: dict[Tensor, Extent] = {}

    def hold_halves(self, weight: nn.Parameter, master: Tensor) -> None:
        """Let the bfloat16 `weight` and its compensation be the float32 `master`."""
        rounded, compensation = split_master(master)
        weight.detach().copy_(rounded)
        self.state[weight][COMPENSATION] = compensation
        self.state[weight].setdefault(STEP, torch.tensor(0.0))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every weight that has a gradient, times `coefficient`. There is no closure."""
        for group in self.param_groups:
            rates = Rates(self.coefficient, group["lr"], group["weight_decay"], group["betas"], group["eps"])
            for name, weight in zip(group["names"], group["params"], strict=True):
                if weight.grad is not None:
                    self._update(name, weight, rates)

    def _update(self, name: str, weight: nn.Parameter, rates: Rates) -> None:
        state = self.state[weight]
        if MOMENTS[0] not in state:
            state.setdefault(STEP, torch.tensor(0.0))
            state |= {kind: torch.zeros_like(weight, dtype=format) for kind, format in self._formats.items()}
        state[STEP] += 1
        step = int(state[STEP])
        key, extent = draw_key(self._seed, name, step), self.extents.get(weight) or Extent.whole(weight)
        pieces = [state[kind] for kind in (*MOMENTS, COMPENSATION) if kind in state]
        for rows, offset in extent.chunks(weight):
            own, gradient, *held = (_rows_of(values)[rows] for values in (weight.detach(), weight.grad, *pieces))
            moments = [moment.float() for moment in held[:2]]
            master = join_master(own, held[2]) if len(held) > 2 else own
            step_adamw(master, gradient.float(), *moments, step, rates)
            if len(held) > 2:
                for half, values in zip((own, held[2]), split_master(master), strict=True):
                    half.copy_(values)
            if moments[0].dtype != held[0].dtype:
                drawn = draw_halves(offset, own.shape, extent.shape, key, own.device)
                for moment, values, bits in zip(held, moments, drawn):
                    moment.copy_(round_stochastically(values, bits))


def step_adamw(weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: int, rates: Rates) -> None:
    """AdamW's step number `step`, from 1, in place of `weight` and of both moments."""
    (beta_1, beta_2), rate = rates.betas, rates.learning_rate
    gradient = gradient * rates.factor
    weight.mul_(1 - rate * rates.weight_decay)
    first.mul_(beta_1).add_(gradient * (1 - beta_1))
    second.mul_(beta_2).add_(gradient.square().mul_(1 - beta_2))
    divisor = second.sqrt().div_(sqrt(1 - beta_2**step)).add_(rates.eps)
    weight.sub_(first.div(divisor).mul_(rate / (1 - beta_1**step)))


def make_narrow_adamw(
    named: Iterable[tuple[str, nn.Parameter]],
    group: Callable[[str], Group],
    betas: Sequence[float],
    eps: float,
    form: StateForm,
    seed: int,
) -> NarrowAdamW:
    """The optimizer of named parameters, those of each `group` in a group of it, which keeps its name."""
    groups = group_parameters(named, group)
    own = {"betas": tuple(betas), "eps": eps}
    return NarrowAdamW([one | own for one in groups], form, seed)


def _rows_of(values: Tensor) -> Tensor:
    """The values with a first axis, on the same memory."""
    return values if values.ndim else values.view(1)
