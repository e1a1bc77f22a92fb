"""Activation checkpointing: parts of layers are recomputed in backward, from outside an unmodified model.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", by torch's non-reentrant checkpointing of each layer.
What is not worth recomputing (matrix products, attention) is *kept*: its output is saved, and the layer's second run
takes it from there. What a kept call saves for its own backward is either one of its inputs, which the second run
recomputes, or stays saved. So collectives inside a kept call, such as those of Ulysses and ring attention, run once;
all others run again in backward, on every rank in the same order. Dropout of adapters draws the same random numbers
again: after a call that is skipped, the generator continues from the state in which that call left it.

torch's own selective checkpointing (`create_selective_checkpoint_contexts`) decides operator by operator. Here a whole
call is kept or not: an attention that is an autograd function of many kernels and collectives, or a module.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from dhp.base.messages import RecomputePolicies
from dhp.config.recompute import CHOICES, OFFLOAD
from dhp.parallel.activation.draws import device_of_draws, go_on_from, state_of_draws
from dhp.parallel.activation.offload import Host
from dhp.parallel.activation.saved_tensors import detached, note, noting, top_hooks

ATTENTION, PROJECTIONS, MLP, VISITS = "attention", "projections", "mlp", "visits"
# What each choice keeps of a checkpointed layer. VISITS is the routing of experts: integers that the host waited for.
_KEPT_BY_CHOICE = {
    "light": {VISITS, ATTENTION, PROJECTIONS, MLP},
    "mlp": {VISITS, ATTENTION, PROJECTIONS},
    "linear": {VISITS, ATTENTION},
    "all": {VISITS},
    OFFLOAD: {VISITS},
}

_here = threading.local()  # on GPUs, backward runs layers again in threads of autograd's own


class Watcher(Protocol):
    """Callbacks around the runs of layers."""

    def layer(self, index: int) -> Any:
        """A context around the first run of a layer."""

    def replay(self, index: int) -> Any:
        """A context around a layer's second run, in backward."""


class LayerMap(Protocol):
    """Which modules of a part's layers do what: see `dhp.models.family.LayerParts`."""

    projections: tuple[str, ...]
    mlp: tuple[str, ...]


class RecomputedLayers:
    """Layers of a model, each of which recomputes what its choice says. Choices may change between steps."""

    def __init__(
        self,
        layers: Sequence[nn.Module],
        parts: LayerMap,
        choices: RecomputePolicies,
        watcher: Watcher | None = None,
        device: torch.device | None = None,
    ):
        """device: where layers will compute, if they are elsewhere now."""
        host = Host()
        self._layers = [_Layer(layer, parts, index, watcher, host, device) for index, layer in enumerate(layers)]
        self.choose(choices)

    @property
    def choices(self) -> RecomputePolicies:
        return tuple(layer.choice for layer in self._layers)

    def choose(self, choices: RecomputePolicies) -> None:
        """Set what each layer recomputes from now on. Raises ValueError for too many, too few or unknown ones."""
        unknown = sorted(set(choices) - set(CHOICES))
        if len(choices) != len(self._layers) or unknown:
            raise ValueError(
                f"{len(choices)} choices for {len(self._layers)} layers, unknown: {unknown}; "
                f"give one of {', '.join(CHOICES)} for each layer"
            )
        for layer, choice in zip(self._layers, choices, strict=True):
            layer.choice = choice


class _Layer:
    def __init__(
        self,
        module: nn.Module,
        parts: LayerMap,
        index: int,
        watcher: Watcher | None,
        host: Host,
        device: torch.device | None,
    ):
        self.choice = "none"
        self._index, self._watcher, self._host = index, watcher, host
        self._draws_on = device_of_draws(module, device)
        for what, names in ((PROJECTIONS, parts.projections), (MLP, parts.mlp)):
            for inner in _found(module, names):
                inner.forward = save_output(what, inner.forward)
        # `forward`, not the call: hooks of the layer (ZeRO's) stay outside and run once.
        self._forward = module.forward

        @wraps(self._forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._run(args, kwargs)

        module.forward = forward

    def _run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self._watcher is None or not torch.is_grad_enabled():
            return self._run_once(args, kwargs)
        with self._watcher.layer(self._index):
            return self._run_once(args, kwargs)

    def _run_once(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        if self.choice == "none" or not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        flat, spec = tree_flatten((args, dict(kwargs)))
        positions = [position for position, value in enumerate(flat) if isinstance(value, Tensor)]
        rest = [None if isinstance(value, Tensor) else value for value in flat]
        calls = _Calls(frozenset(_KEPT_BY_CHOICE[self.choice]), self._draws_on)

        def layer(*tensors: Tensor) -> Any:
            # Tensors as arguments, so that the checkpoint saves them where they are seen and counted.
            values = rest.copy()
            for position, tensor in zip(positions, tensors, strict=True):
                values[position] = tensor
            given, named = tree_unflatten(values, spec)
            if not calls.begun:
                with calls.first():
                    return self._forward(*given, **named)
            with self._replay(), calls.again():
                return self._forward(*given, **named)

        given = [flat[position] for position in positions]
        with self._host.keeping(given[0], self._index) if self.choice == OFFLOAD else nullcontext():
            # Generators are read and set anew around each layer, on GPUs too, where anything may draw from them.
            draws = self._draws_on is not None
            return checkpoint(layer, *given, use_reentrant=False, preserve_rng_state=draws)

    @contextmanager
    def _replay(self) -> Iterator[None]:
        with noting(), nullcontext() if self._watcher is None else self._watcher.replay(self._index):
            yield


def _found(layer: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """The modules of these names that the layer has: dense layers and those with experts have others. Raises ValueError
    where it has none of them."""
    inside = dict(layer.named_modules())
    found = [inside[name] for name in names if name in inside]
    if names and not found:
        raise ValueError(f"a {type(layer).__name__} has none of the modules {', '.join(names)}; correct the LayerParts")
    return found


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
    """A kept call: its results; which of its inputs it saved, in order; the state in which it left the generator."""

    results: list[Any]
    spec: Any
    deferred: list[_Deferred]
    drawn: Tensor | None


@dataclass
class _Calls:
    """Kept calls of one run of one layer, in order; the second run takes their results from here."""

    keeps: frozenset[str]
    draws_on: torch.device | None  # see `device_of_draws`
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
def keeping_nothing() -> Iterator[None]:
    """In the block every call runs, whatever a recomputed layer around it keeps: another checkpoint runs it again."""
    with _in_force(None):
        yield


def save_output(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which a recomputed layer does not run again where its choice keeps `what`.

    It must depend on its arguments and parameters alone, and not write to its inputs.
    """

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
        go_on_from(made.drawn, calls.draws_on)
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
    calls.made.append(_Call(remembered, spec, saving.deferred, state_of_draws(calls.draws_on)))
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
