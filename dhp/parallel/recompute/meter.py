"""Measures a stage's activations in bytes and seconds, by layer."""

from __future__ import annotations

import gc
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from dhp.core.reports import LayerUsage, RecomputePolicies, StageUsage
from dhp.core.torch_private import TorchDispatchMode, tree_leaves
from dhp.parallel.recompute.recomputed_layers import leaving_out
from dhp.parallel.recompute.saved_tensors import SavedTensors, plain_tensors


class _Bytes(Protocol):
    has_gradients: bool  # among what `now` and `peak` count

    def begin(self) -> None:
        """A step begins."""

    def now(self) -> int:
        """Bytes of activations at this moment."""

    def peak(self) -> int:
        """The most since the step began."""

    def take_peak(self, gradient_bytes: int) -> int:
        """The most since the step began. gradient_bytes: what the step's gradients take by now."""

    def counting(self) -> Any:
        """A context around forward and around backward."""


class _Saved:
    has_gradients = False

    def __init__(self, model: nn.Module):
        self._saved = SavedTensors(model)
        self.counting = self._saved.counting

    def begin(self) -> None:
        self._saved.take_peak()

    def now(self) -> int:
        return self._saved.bytes

    def peak(self) -> int:
        return self._saved.peak

    def take_peak(self, gradient_bytes: int) -> int:
        return self._saved.take_peak()


class _Allocated:
    has_gradients = True

    def __init__(self) -> None:
        self._between_steps = 0

    def begin(self) -> None:
        torch.cuda.reset_peak_memory_stats()
        self._between_steps = _allocated()

    def now(self) -> int:
        return _allocated() - self._between_steps

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated() - self._between_steps

    def take_peak(self, gradient_bytes: int) -> int:
        # The budget is for what comes on top of weights, gradients and optimizer state.
        return self.peak() - gradient_bytes

    @contextmanager
    def counting(self) -> Iterator[None]:
        yield


def _allocated() -> int:
    # Twice a layer: `torch.cuda.memory_allocated` first puts all of the allocator's counts into a flat dictionary.
    return torch.cuda.memory_stats_as_nested_dict()["allocated_bytes"]["all"]["current"]


class _Stopwatch:
    """Seconds between marks; on GPUs of the work between them, read only when it is done. Of a CPU with one thread
    those that this thread computes: forward and backward are its own work."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def mark(self) -> Any:
        if not self._cuda:
            return self._clock()
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
    of inner layers. before, after: bytes kept outside the layers. last: bytes at the last count, behind layer `at`."""

    rows: int
    last: int = 0
    begun: bool = False  # this pass has come to its layers
    at: int = 0
    held: dict[int, int] = field(default_factory=dict)
    before: int = 0
    after: int = 0


class ActivationMeter:
    """Measures steps. `forward` and `backward` go around the part's work, `layer` and `replay` around a layer's."""

    def __init__(self, model: nn.Module, device: torch.device, kinds: Sequence[str], times_layers: bool = False):
        """times_layers: each layer's forward by itself, too, which a plan of recomputing does not ask for."""
        self._kinds, self._times_layers = kinds, times_layers
        self._bytes: _Bytes = _Allocated() if device.type == "cuda" else _Saved(model)
        self._watch = _Stopwatch(device)
        self._gradients = 0  # the most that came in one backward
        self._passing = (0, 1)  # the most that one took besides these, and its rows
        self._planned_anew = True  # what they say is of other choices
        self._forget()

    def plan_anew(self) -> None:
        """Other choices hold from now on: what backward took under those before is a bound until one was measured."""
        self._planned_anew = True

    def backward_bytes(self, rows: int, gradient_bytes: int) -> int:
        """Bytes that the backward of `rows` takes on top of what is there when it begins, by those that were measured,
        and no more than one of them: of more rows it is not known. gradient_bytes: those that are there already.

        A backward that was not the step's fullest moment needs nothing."""
        most, its_rows = self._passing
        passing = most * min(1.0, rows / its_rows)
        return max(0, int(max(0, self._gradients - gradient_bytes) + passing))

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
    def backward(self, micro_batch: int = 0, gradient_bytes: Callable[[], int] = lambda: 0) -> Iterator[None]:
        """Around the backward pass of one micro-batch. gradient_bytes: of the step's gradients at a moment, where
        `now` has them too."""
        begin, before, peak, there = self._watch.mark(), self._bytes.now(), self._bytes.peak(), gradient_bytes()
        with self._bytes.counting():
            yield
        self._backwards.append((begin, self._watch.mark()))
        most, rows = self._bytes.peak(), max(self._micro_batches[micro_batch].rows, 1)
        if most > peak:
            came = gradient_bytes() - there if self._bytes.has_gradients else 0
            self._add_backward(came, most - before - came, rows)
        elif self._planned_anew:
            self._add_backward(0, 0, rows)

    def _add_backward(self, gradients: int, passing: int, rows: int) -> None:
        if self._planned_anew:
            self._gradients, self._passing, self._planned_anew = gradients, (passing, rows), False
        self._gradients = max(self._gradients, gradients)
        self._passing = max(self._passing, (passing, rows))

    @contextmanager
    def layer(self, index: int) -> Iterator[None]:
        """Around a layer's forward."""
        this, before = self._current, self._bytes.now()
        if not this.begun:
            this.before, this.begun = this.before + before - this.last, True
        else:
            this.held[this.at] += before - this.last
        begin = self._watch.mark() if self._times_layers else None
        yield
        if self._times_layers:
            self._layers.setdefault(index, []).append((begin, self._watch.mark()))
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
        held, added = most.held.get(index, 0), self._added.get(index, 0)
        again_s, forward_s = (self._sum(marks.get(index, [])) for marks in (self._replays, self._layers))
        return LayerUsage(self._kinds[index], choice, held, added, again_s, forward_s)

    def _sum(self, marks: Sequence[tuple[Any, Any]]) -> float:
        return sum(self._watch.seconds(begin, end) for begin, end in marks)

    def _forget(self) -> None:
        self._micro_batches: dict[int, _MicroBatch] = {}
        self._forwards: list[tuple[Any, Any]] = []
        self._backwards: list[tuple[Any, Any]] = []
        self._layers: dict[int, list[tuple[Any, Any]]] = {}
        self._replays: dict[int, list[tuple[Any, Any]]] = {}
        self._added: dict[int, int] = {}


BEFORE = "before"  # the moment in which storages came that were there at first


class LiveStorages(TorchDispatchMode):
    """The count. bytes: now; peak: the most since `begin`, and peak_moment the `moment` that was set then. shared: at
    the peak, bytes by the moment in which their storages were made."""

    of_meta = False  # count tensors without memory, as if they had some, and no others

    def __init__(self, shares: bool = True) -> None:
        """shares: keep `shared`, which takes time at each new peak."""
        super().__init__()
        self._shares = shares
        self._sizes: dict[int, tuple[int, str]] = {}  # of live storages: bytes, and the moment in which each came
        self.bytes = self.peak = 0
        self.moment = self.peak_moment = BEFORE
        self.shared: Counter[str] = Counter()

    def add(self, values: Any) -> None:
        """Count the storages of all tensors inside."""
        for leaf in tree_leaves(values):
            if isinstance(leaf, Tensor):
                for tensor in plain_tensors(leaf):
                    self._add(tensor.untyped_storage())

    def add_present(self) -> None:
        """Count the storages of all tensors that Python knows."""
        gc.collect()
        self.add([one for one in gc.get_objects() if issubclass(type(one), Tensor)])

    def leave_out(self, tensor: Tensor) -> None:
        """Do not count a tensor's storage."""
        for one in plain_tensors(tensor):
            key = one.untyped_storage()._cdata
            self._add(one.untyped_storage())
            self.bytes -= self._sizes[key][0]
            self._sizes[key] = 0, BEFORE

    def begin(self) -> None:
        """The peak begins at what is there now."""
        self.peak = 0
        self._look()

    @contextmanager
    def during(self, moment: str) -> Iterator[None]:
        """Name what happens in the block."""
        before, self.moment = self.moment, moment
        try:
            yield
        finally:
            self.moment = before

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        self.add(found)
        self.after_operation()
        return found

    def after_operation(self) -> None:
        """Called behind each one."""

    def __enter__(self) -> LiveStorages:
        self._resize = torch.UntypedStorage.resize_
        torch.UntypedStorage.resize_ = self._resizing(self._resize)  # FSDP2 frees so what it gathered, past dispatch
        self._offloads = leaving_out(self.leave_out)
        self._offloads.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)
        self._offloads.__exit__(*error)

    def _resizing(self, resize: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(resize)
        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            found = resize(storage, size)
            if storage._cdata in self._sizes:
                before, moment = self._sizes[storage._cdata]
                self._sizes[storage._cdata] = storage.nbytes(), self.moment if storage.nbytes() > before else moment
                self.bytes += storage.nbytes() - before
                self._look()
            return found

        return resized

    def _add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes or (storage.device.type == "meta") != self.of_meta:
            return
        self._sizes[key] = storage.nbytes(), self.moment
        weakref.finalize(storage, self._free, key).atexit = False
        self.bytes += storage.nbytes()
        self._look()

    def _look(self) -> None:
        if self.bytes > self.peak:
            self.peak, self.peak_moment = self.bytes, self.moment
            self.shared = Counter()
            for nbytes, moment in self._sizes.values() if self._shares else ():
                self.shared[moment] += nbytes

    def _free(self, key: int) -> None:
        self.bytes -= self._sizes.pop(key)[0]
