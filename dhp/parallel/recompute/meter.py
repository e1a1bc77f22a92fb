"""Measures a stage's activations on one rank, in bytes and seconds, layer by layer, while it trains.

Bytes are what the allocator says on GPUs, beyond what is there between steps; on CPU, what autograd keeps.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from dhp.core.reports import LayerUsage, RecomputePolicies, StageUsage
from dhp.parallel.recompute.saved_tensors import SavedTensors


class _Bytes(Protocol):
    def begin(self) -> None:
        """A step begins."""

    def now(self) -> int:
        """Bytes of activations at this moment."""

    def take_peak(self, gradient_bytes: int) -> int:
        """The most since the step began. gradient_bytes: what the step's gradients take by now."""

    def counting(self) -> Any:
        """A context around forward and around backward."""


class _Saved:
    def __init__(self, model: nn.Module):
        self._saved = SavedTensors(model)
        self.counting = self._saved.counting

    def begin(self) -> None:
        self._saved.take_peak()

    def now(self) -> int:
        return self._saved.bytes

    def take_peak(self, gradient_bytes: int) -> int:
        return self._saved.take_peak()


class _Allocated:
    def __init__(self) -> None:
        self._between_steps = 0

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        self._between_steps = _allocated()

    def now(self) -> int:
        return _allocated() - self._between_steps

    def take_peak(self, gradient_bytes: int) -> int:
        # The budget is for what comes on top of weights, gradients and optimizer state.
        return torch.cuda.max_memory_allocated() - self._between_steps - gradient_bytes

    @contextmanager
    def counting(self) -> Iterator[None]:
        yield


def _allocated() -> int:
    # Twice a layer: `torch.cuda.memory_allocated` first puts all of the allocator's counts into a flat dictionary.
    return torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["current"]


class _Stopwatch:
    """Seconds between marks; on GPUs of the work between them, read only when it is done."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"

    def mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        if not self._cuda:
            return end - begin
        end.synchronize()
        return begin.elapsed_time(end) / 1000.0


@dataclass
class _MicroBatch:
    """One micro-batch's forward, in as many passes as the stage has chunks.

    held: bytes that each layer keeps, with what is kept between it and the next, as where a tower hands on the states
    of inner layers. before, after: bytes kept outside the layers. last: bytes at the last count, behind layer `at`.
    """

    rows: int
    last: int = 0
    begun: bool = False  # this pass has come to its layers
    at: int = 0
    held: dict[int, int] = field(default_factory=dict)
    before: int = 0
    after: int = 0


class ActivationMeter:
    """Measures steps. `forward` and `backward` go around the part's work, `layer` and `replay` around a layer's."""

    def __init__(self, model: nn.Module, device: torch.device, kinds: Sequence[str]):
        self._kinds = kinds
        self._bytes: _Bytes = _Allocated() if device.type == "cuda" else _Saved(model)
        self._watch = _Stopwatch(device)
        self._forget()

    def now(self) -> int:
        """Bytes of activations at this moment."""
        return self._bytes.now()

    @contextmanager
    def forward(self, rows: int, micro_batch: int = 0) -> Iterator[None]:
        """Around a forward pass of one micro-batch of `rows` patches or tokens, through a chunk of layers."""
        if not self._micro_batches:
            self._bytes.begin()
        this = self._micro_batches.setdefault(micro_batch, _MicroBatch(rows))
        this.last, this.begun = self._bytes.now(), False
        self._current = this
        begin = self._watch.mark()
        with self._bytes.counting():
            yield
        self._forwards.append((begin, self._watch.mark()))
        this.after += self._bytes.now() - this.last

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around the backward pass of one micro-batch."""
        begin = self._watch.mark()
        with self._bytes.counting():
            yield
        self._backwards.append((begin, self._watch.mark()))

    @contextmanager
    def layer(self, index: int) -> Iterator[None]:
        """Around a layer's forward."""
        this, before = self._current, self._bytes.now()
        if not this.begun:
            this.before, this.begun = this.before + before - this.last, True
        else:
            this.held[this.at] += before - this.last
        yield
        this.last, this.at = self._bytes.now(), index
        this.held[index] = this.last - before

    @contextmanager
    def replay(self, index: int) -> Iterator[None]:
        """Around a layer's second run, in backward, which torch ends by an exception when it has all it needs."""
        before, begin = self._bytes.now(), self._watch.mark()
        try:
            yield
        finally:
            self._replays.setdefault(index, []).append((begin, self._watch.mark()))
            self._added[index] = max(self._added.get(index, 0), self._bytes.now() - before)

    def take(self, choices: RecomputePolicies, gradient_bytes: int = 0) -> StageUsage | None:
        """The step's usage under these choices; None when this stage had no work in it. To be called before the
        optimizer takes its step: what that allocates is no activation. gradient_bytes: of the step's own gradients."""
        if not self._micro_batches:
            return None
        most = max(self._micro_batches.values(), key=lambda one: sum(one.held.values()))
        held = most.before + sum(most.held.values()) + most.after  # no gradient may be there yet when it is
        usage = StageUsage(
            peak_bytes=max(self._bytes.take_peak(gradient_bytes), held),
            before_bytes=most.before,
            after_bytes=most.after,
            rows=most.rows,
            all_rows=sum(one.rows for one in self._micro_batches.values()),
            forward_s=self._sum(self._forwards),
            backward_s=self._sum(self._backwards),
            layers=tuple(self._layer(index, most, choice) for index, choice in enumerate(choices)),
        )
        self._forget()
        return usage

    def _layer(self, index: int, most: _MicroBatch, choice: str) -> LayerUsage:
        seconds = self._sum(self._replays.get(index, []))
        return LayerUsage(self._kinds[index], choice, most.held.get(index, 0), self._added.get(index, 0), seconds)

    def _sum(self, marks: Sequence[tuple[Any, Any]]) -> float:
        return sum(self._watch.seconds(begin, end) for begin, end in marks)

    def _forget(self) -> None:
        self._micro_batches: dict[int, _MicroBatch] = {}
        self._forwards: list[tuple[Any, Any]] = []
        self._backwards: list[tuple[Any, Any]] = []
        self._replays: dict[int, list[tuple[Any, Any]]] = {}
        self._added: dict[int, int] = {}
