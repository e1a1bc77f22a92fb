"""AdamW in chunks: 16-bit states, stochastic rounding, host moments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from math import prod, sqrt
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from dhp.core.parameters import COMPENSATION, MOMENTS, ParameterGroup, StateForm
from dhp.parallel.optim.base import STEP, ScalingOptimizer, group_parameters, join_master, split_master
from dhp.parallel.optim.value_ranges import HeldBlock, PlacedOptimizer


class HasMoments(Protocol):
    """Something that an optimizer does with rows of moments."""

    @property
    def moments(self) -> Sequence[Tensor]:
        """The rows, in host memory."""


Job = TypeVar("Job", bound=HasMoments)


class HostMoments:
    """The copies of one optimizer."""

    def __init__(self, device: torch.device):
        """device: that the rows are updated on."""
        self._device, self._cuda = device, device.type == "cuda"
        if self._cuda:
            self._coming, self._going = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Zeros in host memory."""
        return torch.zeros(tuple(shape), dtype=dtype, pin_memory=self._cuda)

    def ahead(self, jobs: Iterable[Job]) -> Iterator[tuple[Job, list[Tensor]]]:
        """Each job, with its rows on the device. Those of the next one are on their way by then."""
        if self._cuda:
            self._coming.wait_stream(self._going)  # of the step before
        waiting = None
        for job in jobs:
            coming = job, self._fetch(job.moments)
            if waiting is not None:
                yield self._arrived(*waiting)
            waiting = coming
        if waiting is not None:
            yield self._arrived(*waiting)

    def put_back(self, host: Sequence[Tensor], rows: Sequence[Tensor]) -> None:
        """Begin to copy updated `rows` to where they came from."""
        if not self._cuda:
            for there, here in zip(host, rows, strict=True):
                there.copy_(here)
            return
        self._going.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._going):
            for there, here in zip(host, rows, strict=True):
                there.copy_(here, non_blocking=True)
                here.record_stream(self._going)  # its memory is not reused before it was read

    def settle(self) -> None:
        """Wait until all rows are back."""
        if self._cuda:
            self._going.synchronize()

    def _fetch(self, host: Sequence[Tensor]) -> list[Tensor]:
        if not self._cuda:
            return [rows.clone() for rows in host]
        with torch.cuda.stream(self._coming):
            return [rows.to(self._device, non_blocking=True) for rows in host]

    def _arrived(self, job: Job, rows: list[Tensor]) -> tuple[Job, list[Tensor]]:
        if self._cuda:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._coming)
            for one in rows:
                one.record_stream(current)
        return job, rows


_MASK = (1 << 32) - 1
# Shifts and factors of a mixer of 32 bits, by Wellons' hash-prospector. Factors below 2³¹, so that no product of int64
# overflows.
_ROUNDS = ((16, 0x21F0AAAD), (15, 0x735A2D97))
_LAST_SHIFT = 15


def draw_key(seed: int, name: str, step: int) -> int:
    """32 bits that are another number for each seed, parameter and step."""
    return int.from_bytes(blake2b(f"{seed} {step} {name}".encode(), digest_size=4).digest(), "little")


def draw_halves(
    offset: Sequence[int], shape: Sequence[int], whole: Sequence[int], key: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Two independent whole numbers from 0 to 2¹⁶ - 1, int32, for each element of the block of `shape` that begins at
    `offset` in a parameter of shape `whole`."""
    index = torch.zeros((), dtype=torch.int64, device=device)
    for axis, (begin, count) in enumerate(zip(offset, shape, strict=True)):
        along = torch.arange(begin, begin + count, device=device) * prod(whole[axis + 1 :])
        index = index + along.view(-1, *[1] * (len(shape) - axis - 1))
    bits = (index & _MASK).bitwise_xor_(key)
    for shift, factor in _ROUNDS:
        bits.bitwise_xor_(bits >> shift).mul_(factor).bitwise_and_(_MASK)
    bits.bitwise_xor_(bits >> _LAST_SHIFT)
    return (bits & 0xFFFF).to(torch.int32), (bits >> 16).to(torch.int32)


def round_stochastically(values: Tensor, drawn: Tensor) -> Tensor:
    """Finite float32 numbers as bfloat16: away from 0 where what is cut off, in 2⁻¹⁶ of the last place, and `drawn`,
    whole numbers below 2¹⁶, give one together; else towards 0."""
    upper = (values.contiguous().view(torch.int32) + drawn) >> 16
    return upper.to(torch.int16).view(torch.bfloat16)


CHUNK_ELEMENTS = 1 << 21  # that are in float32 at a time, some 90 MB with all temporaries


class ChunkExtent(NamedTuple):
    """Which blocks of a parameter of `shape` a weight is made of."""

    shape: tuple[int, ...]
    blocks: Sequence[HeldBlock]

    @classmethod
    def whole(cls, weight: Tensor) -> ChunkExtent:
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
    rates: StepRates


class StepRates(NamedTuple):
    """What a step does with a gradient: `factor` is what it is multiplied by before anything else."""

    factor: float
    learning_rate: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float


class ChunkedAdamW(ScalingOptimizer):
    """AdamW of weights in float32, or in bfloat16 with a compensation (`hold_halves`); gradients in any format.

    form: the formats of the moments. seed: of stochastic rounding. host: moments lie in host memory. extents: by
    weight, what of a parameter it is; one that has none is whole."""

    def __init__(self, groups: Sequence[dict[str, Any]], form: StateForm, seed: int, host: bool = False):
        super().__init__(groups, {})
        self._formats = {kind: getattr(torch, form.format(kind)) for kind in MOMENTS}
        self._seed = seed
        there = next((weight.device for group in groups for weight in group["params"]), torch.device("cpu"))
        self._host = HostMoments(there) if host else None
        self.extents: dict[Tensor, ChunkExtent] = {}

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
            rates = StepRates(self.coefficient, group["lr"], group["weight_decay"], group["betas"], group["eps"])
            for name, weight in zip(group["names"], group["params"], strict=True):
                if weight.grad is not None:
                    yield from self._chunks_of(name, weight, rates)

    def _chunks_of(self, name: str, weight: nn.Parameter, rates: StepRates) -> Iterator[_Chunk]:
        state = self.state[weight]
        if MOMENTS[0] not in state:
            state.setdefault(STEP, torch.tensor(0.0))
            state |= self.new_moments(weight)
        state[STEP] += 1
        step = int(state[STEP])
        key, extent = draw_key(self._seed, name, step), self.extents.get(weight) or ChunkExtent.whole(weight)
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


def step_adamw(weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: int, rates: StepRates) -> None:
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
    group: Callable[[str], ParameterGroup],
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
