"""Seconds that this process takes on a device: of its CPU time where one thread computes, else as clocks go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import torch

MOST_RUNS, LEAST_RUNS = 25, 3

Output = TypeVar("Output")


@dataclass(frozen=True)
class Spans:
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

    def both(self, forward: Callable[[], Output], backward: Callable[[Output], object]) -> Spans:
        """Seconds of a forward and of the backward of its output."""
        if self.device.type == "cuda":
            return self._both_on_gpu(forward, backward)
        start = self._clock()
        output = forward()
        between = self._clock()
        backward(output)
        return Spans(between - start, self._clock() - between, between - start)

    def _both_on_gpu(self, forward: Callable[[], Output], backward: Callable[[Output], object]) -> Spans:
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
        return Spans(there, back, launch)

    def once(self, run: Callable[[], object]) -> float:
        """Seconds of one run."""
        spans = self.both(run, lambda _: None)
        return spans.forward

    def median(self, run: Callable[[], Spans], limit_s: float) -> Spans:
        """Of several runs behind a first one that does not count: at least `LEAST_RUNS`, more while they take less than
        the limit."""
        run()
        found: list[Spans] = []
        while len(found) < LEAST_RUNS or (
            len(found) < MOST_RUNS and sum(one.forward + one.backward for one in found) < limit_s
        ):
            found.append(run())
        return Spans(*(median(getattr(one, name) for one in found) for name in ("forward", "backward", "launch")))


@contextmanager
def stopwatch(device: str, threads: int) -> Iterator[Stopwatch]:
    """In the block this process computes with so many threads, and is measured on the device, cpu or cuda."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield Stopwatch(torch.device(device), threads)
    finally:
        torch.set_num_threads(before)
