"""Calls in a recomputed layer whose outputs are saved.

What is not worth recomputing (matrix products, attention) is *kept*: its output is saved, and the layer's second run
takes it from there. What a kept call saves for its own backward is either one of its inputs, which the second run
recomputes, or stays saved. So collectives inside a kept call, such as those of Ulysses and ring attention, run once;
all others run again in backward, on every rank in the same order. No generator is set back for it: what adapters drop
is a function of the tokens (`dhp.core.draws`), and models that draw otherwise are refused.

torch's own selective checkpointing (`create_selective_checkpoint_contexts`) decides operator by operator. Here a whole
call is kept or not: an attention that is an autograd function of many kernels and collectives, or a module."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dhp.core.torch_private import is_traceable_wrapper_subclass, tree_flatten, tree_unflatten
from dhp.parallel.recompute.saved_tensors import detached, note, top_hooks

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
        return partial(_same, detached(tensor))

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


def _same(tensor: Tensor) -> Tensor:
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
