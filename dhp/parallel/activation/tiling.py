"""MLPs that compute some tokens at a time, from outside an unmodified model.

A row's longest tensors are inside of its MLPs, several times as wide as the states, though no token needs another there
(Bekman et al. 2025, "Arctic Long Sequence Training", section 3.1). Here an MLP runs chunk by chunk, each under torch's
checkpointing: memory holds the intermediate states of one chunk, forward and backward, and keeps the MLP's input alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dhp.base.errors import ModelError
from dhp.parallel.activation.checkpointing import keeping_nothing
from dhp.parallel.activation.saved_tensors import noting


def tile_mlps(layers: Sequence[nn.Module], names: Sequence[str], chunks: int) -> None:
    """Have the MLPs of these layers compute their tokens in so many chunks. names: of modules in an MLP, each the MLP's
    own child, as `dhp.models.family.LayerParts.mlp`. Raises ModelError where a layer's are in none."""
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
        def run(chunk: Tensor, again: list[bool]) -> Tensor:
            begun = bool(again)
            again.append(True)
            with keeping_nothing(), noting() if begun else nullcontext():
                return whole(chunk, *others, **named)

        # As many on every rank, though some be empty: sharded weights are gathered for each.
        # In one piece each, also of padded rows: some MLPs take their tokens by a view.
        parts = [part.contiguous() for part in states.tensor_split(chunks, dim=-2)]
        if torch.is_grad_enabled():
            return torch.cat([checkpoint(run, part, [], use_reentrant=False) for part in parts], dim=-2)
        return torch.cat([whole(part, *others, **named) for part in parts], dim=-2)

    mlp.forward = forward
