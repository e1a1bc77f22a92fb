"""Recomputes or offloads parts of layers of an unmodified model."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, wraps
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dhp.config.layout import CHOICES, OFFLOAD
from dhp.core.draws import TokenKeys, current_keys, drawing
from dhp.core.errors import ModelError
from dhp.core.reports import RecomputePolicies
from dhp.core.torch_private import tree_flatten, tree_unflatten
from dhp.core.wrapping import wrap_forward
from dhp.parallel.device import CopyLead
from dhp.parallel.recompute.saved_tensors import (
    _Calls,
    detached,
    keeping_nothing,
    note,
    noting,
    part_of_tokens,
    save_output,
    top_hooks,
)

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
        stream, lead = _side(self._device)
        lead.wait()
        self._host = torch.empty(states.shape, dtype=states.dtype, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            self._host.copy_(states.detach(), non_blocking=True)
        states.record_stream(stream)  # its memory is not reused before it was read
        lead.begun(stream)

    def fetch(self) -> None:
        """Begin to copy it back."""
        if self._back is not None or self._device.type != "cuda":
            return
        stream, _ = _side(self._device)
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
def _side(device: torch.device) -> tuple[torch.cuda.Stream, CopyLead]:
    """The stream of all copies to and from host memory, and how many layers' may be under way."""
    return torch.cuda.Stream(device), CopyLead(4)


def _same(tensor: Tensor) -> Tensor:
    return tensor


def tile_mlps(layers: Sequence[nn.Module], names: Sequence[str], chunks: int) -> None:
    """Have the MLPs of these layers compute their tokens in so many chunks. names: of modules in an MLP, each the MLP's
    own child, as `dhp.models.types.LayerParts.mlp`. Raises ModelError where a layer's are in none."""
    for layer in layers:
        inside = dict(layer.named_modules())
        owners = set(name.rpartition(".")[0] for name in names if name in inside)
        owners = {one for one in owners if not any(one.startswith(f"{other}.") for other in owners)}
        if not owners or "" in owners:
            raise ModelError(
                f"mlp_chunks={chunks}: in a {type(layer).__name__} {', '.join(names)} lie in no MLP of their own, "
                "which could be given some tokens at a time. Set mlp_chunks=1"
            )
        for owner in sorted(owners):
            _tile(inside[owner], chunks)


def _tile(mlp: nn.Module, chunks: int) -> None:
    whole = mlp.forward  # not the call: hooks of the module (ZeRO's) stay outside and run once

    @wraps(whole)
    def forward(states: Tensor, *others: Any, **named: Any) -> Tensor:
        def run(chunk: Tensor, keys: TokenKeys | None, again: list[bool]) -> Tensor:
            begun = bool(again)
            again.append(True)
            with keeping_nothing(), part_of_tokens(), drawing(keys), noting() if begun else nullcontext():
                return whole(chunk, *others, **named)

        # As many on every rank, though some be empty: sharded weights are gathered for each.
        # In one piece each, also of padded rows: some MLPs take their tokens by a view.
        parts = [part.contiguous() for part in states.tensor_split(chunks, dim=-2)]
        if torch.is_grad_enabled():
            every = current_keys()
            keys = [every and every.part(states.shape[:-1], number, chunks) for number in range(chunks)]
            ran = (
                checkpoint(run, part, own, [], use_reentrant=False, preserve_rng_state=False)
                for part, own in zip(parts, keys, strict=True)
            )
            return torch.cat(list(ran), dim=-2)
        with part_of_tokens():
            return torch.cat([whole(part, *others, **named) for part in parts], dim=-2)

    wrap_forward(mlp, forward, __name__)


ATTENTION, PROJECTIONS, MLP, VISITS = "attention", "projections", "mlp", "visits"
# What each choice keeps of a checkpointed layer. VISITS is the routing of experts: integers that the host waited for.
_KEPT_BY_CHOICE = {
    "light": {VISITS, ATTENTION, PROJECTIONS, MLP},
    "mlp": {VISITS, ATTENTION, PROJECTIONS},
    "linear": {VISITS, ATTENTION},
    "all": {VISITS},
    OFFLOAD: {VISITS},
}


class Watcher(Protocol):
    """Callbacks around the runs of layers."""

    def layer(self, index: int) -> Any:
        """A context around the first run of a layer."""

    def replay(self, index: int) -> Any:
        """A context around a layer's second run, in backward."""


class LayerMap(Protocol):
    """Which modules of a part's layers do what: see `dhp.models.types.LayerParts`."""

    @property
    def projections(self) -> tuple[str, ...]: ...

    @property
    def mlp(self) -> tuple[str, ...]: ...


class RecomputedLayers:
    """Layers of a model, each of which recomputes what its choice says. Choices may change between steps."""

    def __init__(
        self, layers: Sequence[nn.Module], parts: LayerMap, choices: RecomputePolicies, watcher: Watcher | None = None
    ):
        host = Host()
        self._layers = [_RecomputedLayer(layer, parts, index, watcher, host) for index, layer in enumerate(layers)]
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


class _RecomputedLayer:
    def __init__(self, module: nn.Module, parts: LayerMap, index: int, watcher: Watcher | None, host: Host):
        self.choice = "none"
        self._index, self._watcher, self._host = index, watcher, host
        for what, names in ((PROJECTIONS, parts.projections), (MLP, parts.mlp)):
            for inner in _found(module, names):
                wrap_forward(inner, save_output(what, inner.forward), __name__)
        # `forward`, not the call: hooks of the layer (ZeRO's) stay outside and run once.
        self._forward = module.forward

        @wraps(self._forward)
        def forward(*args: Any, **kwargs: Any) -> Any:
            return self._run(args, kwargs)

        wrap_forward(module, forward, __name__)

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
        calls = _Calls(frozenset(_KEPT_BY_CHOICE[self.choice]))
        keys = current_keys()

        def layer(*tensors: Tensor) -> Any:
            # Tensors as arguments, so that the checkpoint saves them where they are seen and counted.
            values = rest.copy()
            for position, tensor in zip(positions, tensors, strict=True):
                values[position] = tensor
            given, named = tree_unflatten(values, spec)
            if not calls.begun:
                with calls.first():
                    return self._forward(*given, **named)
            with self._replay(), calls.again(), drawing(keys):
                return self._forward(*given, **named)

        given = [flat[position] for position in positions]
        with self._host.keeping(given[0], self._index) if self.choice == OFFLOAD else nullcontext():
            return checkpoint(layer, *given, use_reentrant=False, preserve_rng_state=False)

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
