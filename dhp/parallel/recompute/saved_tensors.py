"""Counts the bytes that autograd saves, and keeps chosen calls."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dhp.core.torch_private import (
    is_traceable_wrapper_subclass,
    is_view_of_parameter,
    saved_tensor_hooks,
    tree_flatten,
    tree_unflatten,
)
from dhp.core.wrapping import call_weakly

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]

_counting: SavedTensors | None = None


class SavedTensors:
    """The count of one part. bytes: kept now; peak: the most at any moment since the last `take_peak`."""

    def __init__(self, model: nn.Module):
        self._model = model
        self._sizes: dict[int, int] = {}  # of counted storages, by their identity
        self._resident: set[int] = set()
        self.bytes = self.peak = 0
        self._hooked = False

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count what autograd saves in this block and what `note` reports, in forward and in backward."""
        global _counting
        self._hook()
        for tensor in _tensors_of(self._model):
            for part in plain_tensors(tensor):
                self._leave_out(_storage(part))
        outer, _counting = _counting, self
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _same):
                yield
        finally:
            _counting = outer

    def _hook(self) -> None:
        if self._hooked:
            return
        self._hooked = True  # not before the first count: an optimizer may exchange parameters for rounded ones
        for parameter in self._model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(call_weakly(self._take_out))

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


_here = threading.local()  # on GPUs, backward runs layers again in threads of autograd's own


class _Deferred(NamedTuple):
    """A view of an input that a kept call saved: its place in the input's memory is that of the first run."""

    source: int
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


class _Result(NamedTuple):
    value: Tensor
    requires_grad: bool


@dataclass
class _Call:
    """A kept call: its results; which of its inputs it saved, in order."""

    results: list[Any]
    spec: Any
    deferred: list[_Deferred]


@dataclass
class _Calls:
    """Kept calls of one run of one layer, in order; the second run takes their results from here."""

    keeps: frozenset[str]
    made: list[_Call] = field(default_factory=list)
    begun: bool = False
    next: int | None = None  # in a second run, the call that comes next

    @contextmanager
    def first(self) -> Iterator[None]:
        self.begun = True
        with _in_force(self):
            yield

    @contextmanager
    def again(self) -> Iterator[None]:
        self.next = 0
        with _in_force(self):
            yield


@contextmanager
def _in_force(calls: _Calls | None) -> Iterator[None]:
    outer = getattr(_here, "calls", None)
    _here.calls = calls
    try:
        yield
    finally:
        _here.calls = outer


@contextmanager
def part_of_tokens() -> Iterator[None]:
    """In the block a module computes some of its tokens, and does so again in backward."""
    outer, _here.part = in_part(), True
    try:
        yield
    finally:
        _here.part = outer


def in_part() -> bool:
    """Whether `part_of_tokens` holds here."""
    return getattr(_here, "part", False)


def runs_again() -> bool:
    """Whether what runs here is inside of a layer, or a part of one, that backward runs again."""
    return in_part() or getattr(_here, "calls", None) is not None


@contextmanager
def keeping_nothing() -> Iterator[None]:
    """In the block every call runs, whatever a recomputed layer around it keeps: another checkpoint runs it again."""
    with _in_force(None):
        yield


def save_output(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which a recomputed layer does not run again where its choice keeps `what`.

    It must depend on its arguments and parameters alone, and not write to its inputs."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        calls = getattr(_here, "calls", None)
        if calls is None or what not in calls.keeps:
            return function(*args, **kwargs)
        inputs = [value for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)]
        if calls.next is None:
            return _keep(calls, inputs, lambda: function(*args, **kwargs))
        made = calls.made[calls.next]
        calls.next += 1
        return _repeat(made, inputs)

    return call


class _Saving:
    """The hook of a kept call: its inputs are left to the checkpoint around it, all else is saved for good."""

    def __init__(self, inputs: Sequence[Tensor]):
        self._pack, self._unpack = top_hooks()
        self._inputs = {t.untyped_storage()._cdata: (i, t.dtype) for i, t in reversed([*enumerate(inputs)])}
        self.deferred: list[_Deferred] = []

    def save(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Save a tensor; returns the function that gets it back."""
        if not is_traceable_wrapper_subclass(tensor):
            source, dtype = self._inputs.get(tensor.untyped_storage()._cdata, (None, None))
            if dtype == tensor.dtype:
                self.deferred.append(_Deferred(source, tensor.shape, tensor.stride(), tensor.storage_offset()))
                return partial(self._unpack, self._pack(tensor))
        elif not isinstance(tensor, nn.Parameter):
            return self._save_inside(tensor.detach())
        note(tensor)
        return partial(_same_call, detached(tensor))

    def _save_inside(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Save what a wrapper such as DTensor holds, and make the wrapper again around it."""
        names, context = tensor.__tensor_flatten__()
        held = {name: getattr(tensor, name) for name in names}
        inner = {name: self.save(value) for name, value in held.items() if isinstance(value, Tensor)}
        others = {name: value for name, value in held.items() if name not in inner}  # a DTensor's mesh
        return partial(_wrap, type(tensor), inner, others, context, tensor.shape, tensor.stride())


def _keep(calls: _Calls, inputs: Sequence[Tensor], run: Callable[[], Any]) -> Any:
    """Run the call, save for good what it saves besides its inputs, and remember its results."""
    saving = _Saving(inputs)
    # Nothing inside is kept by itself: the call is one.
    with _in_force(None), torch.autograd.graph.saved_tensors_hooks(saving.save, _get):
        results = run()
    flat, spec = tree_flatten(results)
    for value in flat:
        if isinstance(value, Tensor):
            note(value)
    remembered = [_Result(v.detach(), v.requires_grad) if isinstance(v, Tensor) else v for v in flat]
    calls.made.append(_Call(remembered, spec, saving.deferred))
    return results


def _repeat(made: _Call, inputs: Sequence[Tensor]) -> Any:
    """The results of a call that was made before; its recomputed inputs are saved in the order in which it did."""
    pack, _ = top_hooks()
    for one in made.deferred:
        pack(torch.as_strided(inputs[one.source].detach(), one.size, one.stride, one.offset))
    flat = [v.value.detach().requires_grad_(v.requires_grad) if isinstance(v, _Result) else v for v in made.results]
    return tree_unflatten(flat, made.spec)


# Functions rather than closures: a closure that holds itself would stay until the garbage collector runs.


def _get(saved: Callable[[], Tensor]) -> Tensor:
    return saved()


def _same_call(tensor: Tensor) -> Tensor:
    return tensor


def _wrap(
    kind: Any,
    inner: Mapping[str, Callable[[], Tensor]],
    others: Mapping[str, Any],
    context: Any,
    shape: torch.Size,
    stride: tuple[int, ...],
) -> Tensor:
    held = {name: get() for name, get in inner.items()} | dict(others)
    return kind.__tensor_unflatten__(held, context, shape, stride)
