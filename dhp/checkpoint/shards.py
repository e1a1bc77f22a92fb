"""A part's weights on disk as its ranks hold them: one safetensors file a rank, and the place of each shard.

Reading puts the pieces together again whatever the number of ranks was. Nothing is pickled.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from dhp.errors import CheckpointError


def save_shards(model: nn.Module, folder: Path, rank: int) -> tuple[str, ...]:
    """Write `rank_NNNNN.safetensors` and its `.json`: on rank 0 all this part holds, on others only their own slices.

    Each entry of the JSON says {"shape": the whole parameter's, "offset": where the piece begins}.
    """
    pieces: dict[str, Tensor] = {}
    places: dict[str, dict[str, list[int]]] = {}
    for name, parameter in model.named_parameters():
        sharded = isinstance(parameter, DTensor) and any(p.is_shard() for p in parameter.placements)
        if rank and not sharded:
            continue
        offset = (0,) * parameter.ndim
        local = parameter.detach()
        if isinstance(local, DTensor):
            _, offset = compute_local_shape_and_global_offset(local.shape, local.device_mesh, local.placements)
            local = local.to_local()
        pieces[name] = local.cpu().contiguous()
        places[name] = {"shape": list(parameter.shape), "offset": list(offset)}
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"rank_{rank:05d}"
    save_file(pieces, folder / f"{stem}.safetensors")
    (folder / f"{stem}.json").write_text(json.dumps(places, indent=1))
    return f"{stem}.safetensors", f"{stem}.json"


def read_shards(folder: Path) -> dict[str, Tensor]:
    """The whole parameters of a part by name.

    Raises CheckpointError when a piece is missing or does not fit.
    """
    whole: dict[str, Tensor] = {}
    filled: dict[str, int] = {}
    places_files = sorted(folder.glob("rank_*.json"))
    if not places_files:
        raise CheckpointError(f"{folder} holds no rank_*.json: it is no part of a checkpoint")
    for places_file in places_files:
        weights = places_file.with_suffix(".safetensors")
        if not weights.is_file():
            raise CheckpointError(f"{weights} is missing beside {places_file.name}: the checkpoint is incomplete")
        places = json.loads(places_file.read_text())
        with safe_open(weights, framework="pt") as file:
            for name, place in places.items():
                piece = file.get_tensor(name)
                target = whole.setdefault(name, torch.empty(place["shape"], dtype=piece.dtype))
                span = tuple(slice(o, o + n) for o, n in zip(place["offset"], piece.shape, strict=True))
                target[span] = piece
                filled[name] = filled.get(name, 0) + piece.numel()
    for name, tensor in whole.items():
        if filled[name] != tensor.numel():
            raise CheckpointError(
                f"{folder}: the pieces of {name} hold {filled[name]} values, but its shape {list(tensor.shape)} "
                f"has {tensor.numel()}: a rank's file is missing or was added twice"
            )
    return whole
