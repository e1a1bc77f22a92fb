"""AdamW for the forms of states that have 16-bit sums, moments or halves of weights, widened as they are read, and for
moments in host memory.

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
from dhp.parallel.optim.fsdp_parts import HeldBlock
from dhp.parallel.optim.host_moments import HostMoments
from dhp.parallel.optim.places import PlacedOptimizer
from dhp.parallel.optim.stochastic import draw_halves, draw_key, round_stochastically

CHUNK_ELEMENTS = 1 << 21  # that are in float32 at a time, some 90 MB with all temporaries


class Extent(NamedTuple):
    """Which blocks of a parameter of `shape` a weight is made of."""

    shape: tuple[int, ...]
    blocks: Sequence[HeldBlock]

    @classmethod
    def whole(cls, weight: Tensor) -> Extent:
        """That of a weight no rank of which has other rows."""
        shape = tuple(_rows_of(weight).shape)
        return cls(shape, [HeldBlock(tuple(slice(0, length) for length in shape), (0,) * len(shape))])

    def chunks(self, weight: Tensor) -> Iterator[tuple[tuple[slice, ...], tuple[int, ...]]]:
        """Parts of the weight, some rows at a time, and where each chunk begins in the whole parameter."""
        rows = _rows_of(weight)
        each = max(1, CHUNK_ELEMENTS // max(1, rows[:1].numel()))
        for (own, *others), offset in self.blocks:
            for begin in range(own.start, own.stop, each):
                taken = slice(begin, min(begin + each, own.stop))
                yield (taken, *others), (offset[0] + begin - own.start, *offset[1:])


class _Chunk(NamedTuple):
    """Rows of a weight with all that a step takes of them, on their memory. They begin at `offset` in a parameter of
    shape `whole`."""

    weight: Tensor
    gradient: Tensor
    moments: list[Tensor]
    compensation: Tensor | None
    offset: tuple[int, ...]
    whole: tuple[int, ...]
    key: int
    step: int
    rates: Rates


class Rates(NamedTuple):
    """What a step does with a gradient: `factor` is what it is multiplied by before anything else."""

    factor: float
    learning_rate: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float


class ChunkedAdamW(ScalingOptimizer):
    """AdamW of weights in float32, or in bfloat16 with a compensation (`hold_halves`); gradients in any format.

    form: the formats of the moments. seed: of stochastic rounding. host: moments lie in host memory. extents: by
    weight, what of a parameter it is; one that has none is whole.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], form: StateForm, seed: int, host: bool = False):
        super().__init__(groups, {})
        self._formats = {kind: getattr(torch, form.format(kind)) for kind in MOMENTS}
        self._seed = seed
        there = next((weight.device for group in groups for weight in group["params"]), torch.device("cpu"))
        self._host = HostMoments(there) if host else None
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
        if self._host is None:
            for chunk in self._chunks():
                _update(chunk, chunk.moments)
            return
        for chunk, moments in self._host.ahead(self._chunks()):
            _update(chunk, moments)
            self._host.put_back(chunk.moments, moments)

    def new_moments(self, weight: Tensor) -> dict[str, Tensor]:
        """Moments of a weight that no step has updated, where they lie."""
        if self._host is None:
            return {kind: torch.zeros_like(weight, dtype=format) for kind, format in self._formats.items()}
        return {kind: self._host.allocate(weight.shape, format) for kind, format in self._formats.items()}

    def settle(self) -> None:
        """Wait until moments are in host memory, where they lie there."""
        if self._host is not None:
            self._host.settle()

    def _chunks(self) -> Iterator[_Chunk]:
        """Rows of each weight that has a gradient, some at a time, for the weight's next step."""
        for group in self.param_groups:
            rates = Rates(self.coefficient, group["lr"], group["weight_decay"], group["betas"], group["eps"])
            for name, weight in zip(group["names"], group["params"], strict=True):
                if weight.grad is not None:
                    yield from self._chunks_of(name, weight, rates)

    def _chunks_of(self, name: str, weight: nn.Parameter, rates: Rates) -> Iterator[_Chunk]:
        state = self.state[weight]
        if MOMENTS[0] not in state:
            state.setdefault(STEP, torch.tensor(0.0))
            state |= self.new_moments(weight)
        state[STEP] += 1
        step = int(state[STEP])
        key, extent = draw_key(self._seed, name, step), self.extents.get(weight) or Extent.whole(weight)
        for taken, offset in extent.chunks(weight):
            own, gradient, *moments = (
                _rows_of(values)[taken] for values in (weight.detach(), weight.grad, *(state[k] for k in MOMENTS))
            )
            half = _rows_of(state[COMPENSATION])[taken] if COMPENSATION in state else None
            yield _Chunk(own, gradient, moments, half, offset, extent.shape, key, step, rates)


def _update(chunk: _Chunk, moments: Sequence[Tensor]) -> None:
    """Update a chunk's rows, and `moments`, on their device, in place."""
    wide = [moment.float() for moment in moments]
    halves = chunk.compensation is not None
    master = join_master(chunk.weight, chunk.compensation) if halves else chunk.weight
    step_adamw(master, chunk.gradient.float(), *wide, chunk.step, chunk.rates)
    if halves:
        for half, values in zip((chunk.weight, chunk.compensation), split_master(master), strict=True):
            half.copy_(values)
    if wide[0].dtype != moments[0].dtype:
        drawn = draw_halves(chunk.offset, chunk.weight.shape, chunk.whole, chunk.key, chunk.weight.device)
        for moment, values, bits in zip(moments, wide, drawn, strict=True):
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


def make_chunked_adamw(
    named: Iterable[tuple[str, nn.Parameter]],
    group: Callable[[str], Group],
    betas: Sequence[float],
    eps: float,
    form: StateForm,
    seed: int,
    host: bool = False,
) -> ChunkedAdamW:
    """The optimizer of named parameters, those of each `group` in a group of it, which keeps its name."""
    groups = group_parameters(named, group)
    own = {"betas": tuple(betas), "eps": eps}
    return ChunkedAdamW([one | own for one in groups], form, seed, host)


def new_states(optimizer: torch.optim.Optimizer, weight: Tensor) -> dict[str, Tensor]:
    """States of a weight that no step has updated, by kind, as the optimizer keeps them."""
    if isinstance(optimizer, PlacedOptimizer):
        return optimizer.new_states(weight)
    if isinstance(optimizer, ChunkedAdamW):
        return optimizer.new_moments(weight)
    return {kind: torch.zeros_like(weight) for kind in MOMENTS}


def _rows_of(values: Tensor) -> Tensor:
    """The values with a first axis, on the same memory."""
    return values if values.ndim else values.view(1)
