"""Counts the bytes that autograd saves, exactly, everywhere.

A tensor that is saved keeps its whole storage, so storages are counted: each once, however many views of it are saved,
from the moment when autograd first saves it until its memory is freed or it is a parameter's gradient. Parameters and
buffers are there anyway and are not counted. Non-reentrant checkpointing hides what it will recompute and saves its
inputs instead, which are counted; `recomputed_layers` reports what it
recomputes inside backward to `note`."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dhp.core.torch_private import is_traceable_wrapper_subclass, is_view_of_parameter, saved_tensor_hooks

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]

_counting: SavedTensors | None = None


class SavedTensors:
    """The count of one part. bytes: kept now; peak: the most at any moment since the last `take_peak`."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._sizes: dict[int, int] = {}  # of counted storages, by their identity
        self._resident: set[int] = set()
        self.bytes = self.peak = 0
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._take_out)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what autograd saves in this block and what `note` reports, in forward and in backward."""
        global _counting
        for tensor in _tensors_of(self._model):
            for part in plain_tensors(tensor):
                self._leave_out(_storage(part))
        outer, _counting = _counting, self
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _same):
                yield
        finally:
            _counting = outer

    def note(self, tensor: Tensor) -> None:
        """Count the tensor's storage until its memory is freed."""
        if _belongs_to_parameter(tensor):
            return
        for part in plain_tensors(tensor):
            storage = _storage(part)
            key = storage._cdata
            if key not in self._sizes and key not in self._resident:
                self._sizes[key] = storage.nbytes()
                self.bytes += storage.nbytes()
                self.peak = max(self.peak, self.bytes)
                weakref.finalize(storage, self._free, key).atexit = False

    def take_peak(self) -> int:
        """The peak since the last time; the next begins at what is kept now."""
        peak, self.peak = self.peak, self.bytes
        return peak

    def _pack(self, tensor: Tensor) -> Tensor:
        self.note(tensor)
        return detached(tensor)

    def _leave_out(self, storage: torch.UntypedStorage) -> None:
        """Do not count it while it lives. ZeRO's stage 3 frees it soon, and something else gets its identity."""
        key = storage._cdata
        if key not in self._resident:
            self._resident.add(key)
            weakref.finalize(storage, self._resident.discard, key).atexit = False

    def _take_out(self, parameter: Tensor) -> None:
        """What was saved may be the parameter's gradient now, as the loss saves that of the head."""
        if parameter.grad is not None:
            for part in plain_tensors(parameter.grad):
                self.bytes -= self._sizes.pop(_storage(part)._cdata, 0)

    def _free(self, key: int) -> None:
        self.bytes -= self._sizes.pop(key, 0)


def note(tensor: Tensor) -> None:
    """Report to the count that is going on, if any, a tensor that is saved for backward past autograd's own hooks."""
    if _counting is not None:
        _counting.note(tensor)


def top_hooks() -> Hooks | None:
    """The saved-tensor hooks that are in force: pack and unpack."""
    return saved_tensor_hooks()


@contextmanager
def noting() -> Iterator[None]:
    """In the block, also report to `note` what the hooks in force save."""
    hooks = None if _counting is None else top_hooks()
    if hooks is None:
        yield
        return
    pack, unpack = hooks

    def noted(tensor: Tensor) -> Any:
        note(tensor)
        return pack(tensor)

    with torch.autograd.graph.saved_tensors_hooks(noted, unpack):
        yield


def detached(tensor: Tensor) -> Tensor:
    """A tensor that a hook may keep: the graph holds the answer, so one inside the graph would keep itself alive.

    Leaves stay as they are, as autograd does it: ZeRO exchanges the memory of a parameter between forward and backward.
    """
    return tensor if tensor.is_leaf else tensor.detach()


def plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors with memory behind a tensor: itself, or what a wrapper such as DTensor holds."""
    if is_traceable_wrapper_subclass(tensor):
        inner = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        for value in inner:
            if isinstance(value, Tensor):  # a DTensor lists its mesh too
                yield from plain_tensors(value)
    else:
        yield tensor


def _tensors_of(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _belongs_to_parameter(tensor: Tensor) -> bool:
    # ZeRO's stage 3 gives parameters new storages all the time, so that those of a moment ago say nothing.
    return isinstance(tensor, nn.Parameter) or is_view_of_parameter(tensor)


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


def _same(tensor: Tensor) -> Tensor:
    return tensor
