"""Offloads the inputs of layers to host memory between forward and backward.

On a GPU, copies run on a stream of their own, concurrently with the layers, into pinned memory; while backward is in
one layer, the input of the layer before it is copied back. On other devices a clone stands in for the host copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from dhp.parallel.recompute.saved_tensors import detached, note, top_hooks

_counts: list[Callable[[Tensor], None]] = []


@contextmanager
def leaving_out(leave_out: Callable[[Tensor], None]) -> Iterator[None]:
    """In the block, call this with each clone that stands in for a copy in host memory."""
    _counts.append(leave_out)
    try:
        yield
    finally:
        _counts.remove(leave_out)


class Away:
    """A tensor that is offloaded, or being copied. before: what the layer before has there."""

    def __init__(self, states: Tensor, index: int, before: Away | None):
        self._device, self._index = states.device, index
        self._before = before if before is not None and before._index == index - 1 else None
        self._back: Tensor | None = None
        self._there: torch.cuda.Event | None = None
        if self._device.type != "cuda":
            self._host = states.detach().clone()
            for leave_out in _counts:
                leave_out(self._host)
            return
        stream = _stream(self._device)
        self._host = torch.empty(states.shape, dtype=states.dtype, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._host.copy_(states.detach(), non_blocking=True)
        states.record_stream(stream)  # its memory is not reused before it was read

    def fetch(self) -> None:
        """Begin to copy it back."""
        if self._back is not None or self._device.type != "cuda":
            return
        stream = _stream(self._device)
        with torch.cuda.stream(stream):  # behind the copy to the host, which is on the same stream
            self._back = self._host.to(self._device, non_blocking=True)
            self._there = stream.record_event()

    def take(self) -> Tensor:
        """The tensor, on its device. Begins to copy back what the layer before has there."""
        self.fetch()
        before, self._before = self._before, None
        if before is not None:
            before.fetch()
        back, self._back = self._back, None
        if back is None:
            return self._host
        assert self._there is not None
        current = torch.cuda.current_stream(self._device)
        current.wait_event(self._there)
        back.record_stream(current)
        return back


class Host:
    """The offloaded inputs of several layers."""

    def __init__(self) -> None:
        self._last: Callable[[], Away | None] = lambda: None  # only a graph holds it

    @contextmanager
    def keeping(self, states: Tensor, index: int) -> Iterator[None]:
        """In the block, where layer `index` saves what enters it, `states`, host memory keeps it. All else that is
        saved goes where it went."""
        outer = top_hooks()
        pack, unpack = (detached, _same) if outer is None else outer
        storage, shape = states.untyped_storage()._cdata, states.shape  # autograd keeps `put`, and what it refers to

        def put(tensor: Tensor) -> Any:
            if tensor.untyped_storage()._cdata != storage or tensor.shape != shape:
                return pack(tensor)
            kept = Away(tensor, index, self._last())
            self._last = weakref.ref(kept)
            return kept

        def get(kept: Any) -> Tensor:
            if not isinstance(kept, Away):
                return unpack(kept)
            states = kept.take()
            note(states)
            return states

        with torch.autograd.graph.saved_tensors_hooks(put, get):
            yield


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _same(tensor: Tensor) -> Tensor:
    return tensor
