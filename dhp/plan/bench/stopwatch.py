"""Measures seconds of passes and updates on a device."""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from statistics import median
from typing import TypeVar

import torch
from torch import Tensor, nn

from dhp.core.parameters import ParameterGroup
from dhp.core.torch_private import copy_each
from dhp.parallel.optim.base import clipped_step, exact_dtype, make_adamw

MOST_RUNS, LEAST_RUNS = 25, 3

Output = TypeVar("Output")


@dataclass(frozen=True)
class TimedPasses:
    """Seconds of a forward and of the backward behind it. launch: of the forward, until the host goes on."""

    forward: float
    backward: float
    launch: float


class Stopwatch:
    """Measures on one device. threads: of a CPU that compute. With one thread CPU seconds are counted, which other
    processes do not lengthen."""

    def __init__(self, device: torch.device, threads: int = 1):
        self.device = device
        self._clock = time.process_time if device.type == "cpu" and threads == 1 else time.perf_counter

    def both(self, forward: Callable[[], Output], backward: Callable[[Output], object]) -> TimedPasses:
        """Seconds of a forward and of the backward of its output."""
        if self.device.type == "cuda":
            return self._both_on_gpu(forward, backward)
        start = self._clock()
        output = forward()
        between = self._clock()
        backward(output)
        return TimedPasses(between - start, self._clock() - between, between - start)

    def _both_on_gpu(self, forward: Callable[[], Output], backward: Callable[[Output], object]) -> TimedPasses:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        torch.cuda.synchronize(self.device)
        begun = time.perf_counter()
        events[0].record()
        output = forward()
        events[1].record()
        launch = time.perf_counter() - begun
        torch.cuda.synchronize(self.device)
        events[2].record()
        backward(output)
        events[3].record()
        torch.cuda.synchronize(self.device)
        there, back = (events[at].elapsed_time(events[at + 1]) / 1e3 for at in (0, 2))
        return TimedPasses(there, back, launch)

    def once(self, run: Callable[[], object]) -> float:
        """Seconds of one run."""
        spans = self.both(run, lambda _: None)
        return spans.forward

    def median(self, run: Callable[[], TimedPasses], limit_s: float) -> TimedPasses:
        """Of several runs behind a first one that does not count: at least `LEAST_RUNS`, more while they take less than
        the limit."""
        run()
        found: list[TimedPasses] = []
        while len(found) < LEAST_RUNS or (
            len(found) < MOST_RUNS and sum(one.forward + one.backward for one in found) < limit_s
        ):
            found.append(run())
        return TimedPasses(*(median(getattr(one, name) for one in found) for name in ("forward", "backward", "launch")))


@contextmanager
def stopwatch(device: str, threads: int) -> Iterator[Stopwatch]:
    """In the block this process computes with so many threads, and is measured on the device, cpu or cuda."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield Stopwatch(torch.device(device), threads)
    finally:
        torch.set_num_threads(before)


SIDE = 768  # of a square matrix; three of them are more than a core's own cache
START_S = 60.0


@contextmanager
def companions(count: int, threads: int) -> Iterator[None]:
    """In the block so many other processes multiply matrices and pass over memory, each with so many threads. Where one
    does not begin in time, the block runs without it."""
    context = multiprocessing.get_context("spawn")
    begun = [context.Event() for _ in range(count)]
    others = [context.Process(target=_compute, args=(threads, one), daemon=True) for one in begun]
    for other in others:
        other.start()
    try:
        ends = time.monotonic() + START_S
        for one, other in zip(begun, others, strict=True):
            while not one.wait(0.1) and other.is_alive() and time.monotonic() < ends:
                pass
        yield
    finally:
        for other in others:
            other.kill()
            other.join(START_S)


def _compute(threads: int, begun: Event) -> None:
    import torch

    torch.set_num_threads(threads)
    left, right = torch.rand(SIDE, SIDE), torch.rand(SIDE, SIDE)
    result = left @ right
    begun.set()
    parent = multiprocessing.parent_process()
    while parent is not None and parent.is_alive():  # one that is killed ends nobody
        torch.mm(left, right, out=result)
        result.add_(left).mul_(0.5)


_SIDE, _MATRICES = 2048, 4  # more than caches hold
_RATE = 1e-3


def measure_update(dtype: str, watch: Stopwatch, limit_s: float) -> float:
    """Seconds for each parameter of a step of AdamW with clipped gradients, for a part that computes in `dtype`: with
    master weights where that is a format of 16 bits, which are rounded behind it."""
    computed = getattr(torch, dtype)
    exact = exact_dtype(computed)

    def matrix(value: float, of: torch.dtype) -> Tensor:
        return torch.full((_SIDE, _SIDE), value, dtype=of, device=watch.device)

    masters = [nn.Parameter(matrix(0.5, exact)) for _ in range(_MATRICES)]
    rounded = [matrix(0.5, computed) for _ in masters] if computed != exact else []
    group = ParameterGroup("part", _RATE, 0.0, 0)
    named = [(str(at), one) for at, one in enumerate(masters)]
    optimizer = make_adamw(named, lambda name: group, (0.9, 0.999), 1e-8)
    for one in masters:
        one.grad = matrix(0.01, exact)

    @torch.no_grad()
    def update() -> None:
        clipped_step(optimizer, [one.grad for one in masters if one.grad is not None], _RATE, 0.5)
        if rounded:
            copy_each(rounded, [one.detach() for one in masters])

    spans = watch.median(lambda: TimedPasses(watch.once(update), 0.0, 0.0), limit_s)
    return spans.forward / (_MATRICES * _SIDE * _SIDE)
