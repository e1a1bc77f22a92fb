"""Activation checkpointing: parts of layers are recomputed in backward, from outside an unmodified model.

Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost", by torch's non-reentrant checkpointing of each layer.
What is not worth recomputing is kept: see `dhp.parallel.recompute.saved_calls`.

A row's longest tensors are inside of its MLPs, several times as wide as the states, though no token needs another there
(Bekman et al. 2025, "Arctic Long Sequence Training", section 3.1). Here an MLP runs chunk by chunk, each under torch's
checkpointing: memory holds the intermediate states of one chunk, forward and backward, and keeps the MLP's input alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from dhp.config.recompute import CHOICES, OFFLOAD
from dhp.core.draws import TokenKeys, current_keys, drawing
from dhp.core.errors import ModelError
from dhp.core.reports import RecomputePolicies
from dhp.parallel.recompute.offload import Host
from dhp.parallel.recompute.saved_calls import _Calls, keeping_nothing, part_of_tokens, save_output
from dhp.parallel.recompute.saved_tensors import noting


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

    mlp.forward = forward


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
        self,
        layers: Sequence[nn.Module],
        parts: LayerMap,
        choices: RecomputePolicies,
        watcher: Watcher | None = None,
    ):
        host = Host()
        self._layers = [_Layer(layer, parts, index, watcher, host) for index, layer in enumerate(layers)]
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
    ):
        self.choice = "none"
        self._index, self._watcher, self._host = index, watcher, host
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
