"""Processes that compute beside a measurement, as a run's other ranks do: a core alone is faster than one of several
that share caches, memory and power."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.synchronize import Event

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
