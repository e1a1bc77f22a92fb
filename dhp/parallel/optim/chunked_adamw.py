"""AdamW in chunks: 16-bit states, stochastic rounding, host moments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from math import prod, sqrt
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn

from dhp.core.parameters import COMPENSATION, MOMENTS, ParameterGroup, StateForm
from dhp.parallel.device import CopyLead
from dhp.parallel.kernels.elementwise import can_compile, compile_apart
from dhp.parallel.optim.base import STEP, ScalingOptimizer, group_parameters, join_master, split_master
from dhp.parallel.optim.value_ranges import HeldBlock, PlacedOptimizer


class HasMoments(Protocol):
    """Something that an optimizer does with rows of moments."""

    @property
    def moments(self) -> Sequence[Tensor]:
        """The rows, in host memory."""


Job = TypeVar("Job", bound=HasMoments)


CHUNKS_UNDER_WAY = 3


class HostMoments:
    """The copies of one optimizer."""

    def __init__(self, device: torch.device):
        """device: that the rows are updated on."""
        self._device, self._cuda = device, device.type == "cuda"
        if self._cuda:
            self._coming, self._going = torch.cuda.Stream(device), torch.cuda.Stream(device)
            self._lead = CopyLead(CHUNKS_UNDER_WAY)

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
        self._lead.begun(self._going)

    def settle(self) -> None:
        """Wait until all rows are back."""
        if self._cuda:
            self._going.synchronize()

    def _fetch(self, host: Sequence[Tensor]) -> list[Tensor]:
        if not self._cuda:
            return [rows.clone() for rows in host]
        self._lead.wait()
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
    return _halves(shape, _places(key, offset, whole), device)


def _places(key: int, offset: Sequence[int], whole: Sequence[int]) -> tuple[int, ...]:
    """What `_halves` needs of a block: key, where it begins on each axis, and elements from one index to the next."""
    return key, *offset, *(prod(whole[axis + 1 :]) for axis in range(len(whole)))


def _halves(shape: Sequence[int], places: Sequence[Any], device: torch.device) -> tuple[Tensor, Tensor]:
    key, begins, strides = places[0], places[1 : len(shape) + 1], places[len(shape) + 1 :]
    index = torch.zeros((), dtype=torch.int64, device=device)
    for axis, (count, begin, stride) in enumerate(zip(shape, begins, strides, strict=True)):
        along = (torch.arange(count, device=device) + begin) * stride
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

    def chunks(self, weight: Tensor, elements: int) -> Iterator[tuple[tuple[slice, ...], tuple[int, ...]]]:
        """Parts of the weight, rows of that many elements at a time, and where each chunk begins in the whole
        parameter."""
        rows = _rows_of(weight)
        each = max(1, elements // max(1, rows[:1].numel()))
        for (own, *others), offset in self.blocks:
            for begin in range(own.start, own.stop, each):
                taken = slice(begin, min(begin + each, own.stop))
                yield (taken, *others), (offset[0] + begin - own.start, *offset[1:])


class _Chunk(NamedTuple):
    """Rows of a weight with all that a step takes of them, on their memory. numbers, places: see `StepRates.numbers`
    and `_places`."""

    weight: Tensor
    gradient: Tensor
    moments: list[Tensor]
    compensation: Tensor | None
    numbers: Sequence[Any]
    places: Sequence[Any]


class StepRates(NamedTuple):
    """What a step does with a gradient: `factor` is what it is multiplied by before anything else."""

    factor: float
    learning_rate: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float

    def numbers(self, step: int) -> tuple[float, ...]:
        """What `step_adamw` takes in step number `step`, from 1."""
        beta_1, beta_2 = self.betas
        pace, root = self.learning_rate / (1 - beta_1**step), sqrt(1 - beta_2**step)
        decay = 1 - self.learning_rate * self.weight_decay
        return self.factor, decay, beta_1, 1 - beta_1, beta_2, 1 - beta_2, root, self.eps, pace


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
        self._kernels = UpdateKernels(there) if there.type == "cuda" and can_compile() else None
        # A kernel takes what it computes in from registers; without one, temporaries bound a chunk.
        self._elements = WHOLE if self._kernels is not None and not host else CHUNK_ELEMENTS
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
        chunks = self._chunks() if self._kernels is None else self._kernels.placed(list(self._chunks()))
        if self._host is None:
            for chunk in chunks:
                self._update(chunk)
            return
        for chunk, moments in self._host.ahead(chunks):
            self._update(chunk._replace(moments=moments))
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
        for taken, offset in extent.chunks(weight, self._elements):
            own, gradient, *moments = (
                _rows_of(values)[taken] for values in (weight.detach(), weight.grad, *(state[k] for k in MOMENTS))
            )
            half = _rows_of(state[COMPENSATION])[taken] if COMPENSATION in state else None
            yield _Chunk(own, gradient, moments, half, rates.numbers(step), _places(key, offset, extent.shape))

    def _update(self, chunk: _Chunk) -> None:
        kernel = None if self._kernels is None else self._kernels.find(chunk)
        (kernel or update_rows)(*chunk)


def update_rows(
    weight: Tensor,
    gradient: Tensor,
    moments: Sequence[Tensor],
    compensation: Tensor | None,
    numbers: Sequence[Any],
    places: Sequence[Any],
) -> None:
    """Update rows of a weight and their moments and compensation, in place."""
    wide = [moment.float() for moment in moments]
    master = weight if compensation is None else join_master(weight, compensation)
    step_adamw(master, gradient.float(), *wide, numbers)
    if compensation is not None:
        for half, values in zip((weight, compensation), split_master(master), strict=True):
            half.copy_(values)
    if wide[0].dtype != moments[0].dtype:
        drawn = _halves(weight.shape, places, weight.device)
        for moment, values, bits in zip(moments, wide, drawn, strict=True):
            moment.copy_(round_stochastically(values, bits))


def step_adamw(weight: Tensor, gradient: Tensor, first: Tensor, second: Tensor, numbers: Sequence[Any]) -> None:
    """A step of AdamW in place of `weight` and of both moments. numbers: of `StepRates`, or scalars that hold them."""
    factor, decay, beta_1, rest_1, beta_2, rest_2, root, eps, pace = numbers
    gradient = gradient * factor
    weight.mul_(decay)
    first.mul_(beta_1).add_(gradient * rest_1)
    second.mul_(beta_2).add_(gradient.square().mul_(rest_2))
    weight.sub_(first.div(second.sqrt().div_(root).add_(eps)).mul_(pace))


Update = Callable[..., None]
WHOLE = 1 << 62  # elements of a chunk: all of a weight's rows
AS_EAGER = {
    "emulate_precision_casts": True,
    "eager_numerics.division_rounding": True,
}  # a compiler's: round each product
_TRIAL_ROWS, _TRIAL_WIDTH, _TRIAL_BETWEEN = 67, 131, 3  # between: of the dimensions of a convolution


def _update_placed(
    weight: Tensor,
    gradient: Tensor,
    moments: Sequence[Tensor],
    compensation: Tensor | None,
    numbers: Tensor,
    places: Tensor,
) -> None:
    update_rows(weight, gradient, moments, compensation, numbers.unbind(), places.unbind())


class UpdateKernels:
    """`update_rows` as one kernel a chunk, each proved at its first chunk to give what it gives, to the bit."""

    def __init__(self, device: torch.device):
        """device: of all chunks."""
        self._device = device
        self._proved: dict[tuple[Any, ...], Update | None] = {}

    def placed(self, chunks: Sequence[_Chunk]) -> list[_Chunk]:
        """The chunks with their numbers on the device: a kernel that had them as constants would be another each
        step."""
        widest = max((len(chunk.places) for chunk in chunks), default=0)
        padded = [(*chunk.places, *[0] * (widest - len(chunk.places))) for chunk in chunks]
        both = zip(
            chunks, self._send([chunk.numbers for chunk in chunks], torch.float64), self._send(padded, torch.int64)
        )
        return [chunk._replace(numbers=numbers, places=places[: len(chunk.places)]) for chunk, numbers, places in both]

    def find(self, chunk: _Chunk) -> Update | None:
        """The kernel of such chunks; None where it could not be made or proved."""
        tensors = (chunk.weight, chunk.gradient, *chunk.moments, chunk.compensation)
        kind = (chunk.weight.ndim, *(one is not None and (one.dtype, one.is_contiguous()) for one in tensors))
        if kind not in self._proved:
            kernel = compile_apart(_update_placed, AS_EAGER)
            self._proved[kind] = kernel if self._is_proved(chunk, kernel) else None
        return self._proved[kind]

    def _is_proved(self, chunk: _Chunk, kernel: Update) -> bool:
        """Whether it gives the bits of `update_rows` on a small chunk of the same kind, of numbers of many sizes."""
        tensors = (chunk.weight, chunk.gradient, *chunk.moments, chunk.compensation)
        trial = [None if one is None else self._like(one, seed) for seed, one in enumerate(tensors)]
        shape = trial[0].shape
        places = self._send([_places(1234567, (3,) * len(shape), [2 * length for length in shape])], torch.int64)[0]
        numbers = self._send([StepRates(0.7, 1e-3, 0.1, (0.9, 0.999), 1e-8).numbers(3)], torch.float64)[0]
        found = []
        for update in (update_rows, kernel):
            weight, gradient, *moments, half = [None if one is None else one.clone() for one in trial]
            update(weight, gradient, moments, half, numbers, places)
            found.append([weight, *moments, *([] if half is None else [half])])
        return all(map(torch.equal, *found))

    def _like(self, tensor: Tensor, seed: int) -> Tensor:
        """Positive numbers from 1e-12 to 10, or whole numbers of 16 bits, in a small tensor of the same kind."""
        shape = [_TRIAL_ROWS, *[_TRIAL_BETWEEN] * (tensor.ndim - 2), *[_TRIAL_WIDTH] * (tensor.ndim > 1)]
        shape[-1] += not tensor.is_contiguous()
        drawn = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
        values = (drawn - 0.5) * (1 << 16) if tensor.dtype == torch.int16 else 10 ** (drawn * 13 - 12)
        return values.to(self._device, tensor.dtype)[..., : shape[-1] - (not tensor.is_contiguous())]

    def _send(self, rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Sequence[Tensor]:
        table = torch.tensor(rows, dtype=dtype, pin_memory=self._device.type == "cuda")
        return table.to(self._device, non_blocking=True).unbind()


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
