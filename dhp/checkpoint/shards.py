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
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from dhp.errors import CheckpointError


def save_shards(model: nn.Module, folder: Path, rank: int) -> tuple[str, ...]:
    """Write `rank_NNNNN.safetensors` and its `.json`: on rank 0 all this part holds, on others only their own slices.

    Each entry of the JSON says {"shape": the whole parameter's, "offset": where the piece begins}.
    """
    pieces: dict[str, Tensor] = {}
    places: dict[str, dict[str, list[int]]] = {}
    for name, parameter in model.named_parameters():
        sharded = isinstance(parameter, DTensor) and not all(p.is_replicate() for p in parameter.placements)
        if rank and not sharded:
            continue
        local, offset = _own_piece(parameter.detach())
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
                _place(piece, target, place, f"{weights}: {name}")
                filled[name] = filled.get(name, 0) + piece.numel()
    for name, tensor in whole.items():
        if filled[name] != tensor.numel():
            raise CheckpointError(
                f"{folder}: the pieces of {name} hold {filled[name]} values, but its shape {list(tensor.shape)} "
                f"has {tensor.numel()}: a rank's file is missing or was added twice"
            )
    return whole


def _own_piece(weight: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's slice of a weight, and where in the whole it begins."""
    if not isinstance(weight, DTensor):
        return weight, (0,) * weight.ndim
    # A rank of a fused weight holds a slice of each half, which is no block of the whole: exchanged for one here,
    # on all tensor ranks at once.
    blocks = tuple(Shard(p.dim) if isinstance(p, _StridedShard) else p for p in weight.placements)
    weight = weight.redistribute(placements=blocks)
    _, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    return weight.to_local(), tuple(offset)


def _place(piece: Tensor, whole: Tensor, place: dict[str, list[int]], where: str) -> None:
    ends = [o + n for o, n in zip(place["offset"], piece.shape, strict=True)]
    if list(whole.shape) != place["shape"] or any(e > n for e, n in zip(ends, whole.shape, strict=True)):
        raise CheckpointError(
            f"{where}: a piece of shape {list(piece.shape)} at {place['offset']} of {place['shape']} does not fit the "
            f"weight's {list(whole.shape)}: the files belong to different checkpoints"
        )
    whole[tuple(slice(o, e) for o, e in zip(place["offset"], ends, strict=True))] = piece
