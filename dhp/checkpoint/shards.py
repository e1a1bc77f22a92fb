"""A part's tensors on disk as its ranks hold them: safetensors files of each rank, and the extent of each piece.

Reading puts pieces together again whatever the number of ranks was. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from dhp.checkpoint.files import read_extents, reading, sync, write_text, writing
from dhp.core.errors import CheckpointError

# {"shape": of the whole, and "offset": of a block in it, or "flat": of a range of its elements}
PieceExtent = dict[str, Any]

FILE_BYTES = 256 << 20  # of pieces that a rank collects in host memory before it writes a file


EXTENTS = "rank_*.json"  # which pieces each rank wrote, beside a file of their values


class ShardWriter:
    """Writes what one rank holds into `rank_NNNNN.safetensors`, further ones `rank_NNNNN_NNN.safetensors`, and next to
    each a `.json` with the extent of each piece. No more than about `FILE_BYTES` is in host memory at a time, whatever
    the rank holds."""

    def __init__(self, folder: Path, rank: int, stage_rank: int | None = None, only: Collection[str] | None = None):
        """rank: its number in the part, whose stages hold different layers. stage_rank: its number in the stage;
        None: the part is one stage. only: names that are written of all that are added; None: all."""
        self._only = only
        self._folder, self._rank = folder, rank
        self._stage_rank = rank if stage_rank is None else stage_rank
        self._pending: list[dict[str, tuple[Tensor, PieceExtent]]] = []  # by file; a file has one piece of a tensor
        self._nbytes = 0
        self._files: list[str] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """A plain tensor, the same on all ranks of the stage, of which the first writes it; or a DTensor, of which each
        rank writes its slice."""
        if self._stage_rank and not _is_sharded(tensor):
            return
        local, offset = _own_piece(tensor.detach())
        self._keep(name, local, {"shape": list(tensor.shape), "offset": list(offset)})

    def add_once(self, name: str, tensor: Tensor) -> None:
        """A tensor that is the same on all ranks of the part: the first of them writes it."""
        if not self._rank:
            self.add(name, tensor)

    def add_flat(self, name: str, elements: Tensor, start: int, shape: tuple[int, ...]) -> None:
        """Consecutive elements of a tensor of `shape`, from its `start`-th on in row-major order."""
        self._keep(name, elements.detach(), {"shape": list(shape), "flat": start})

    def add_block(self, name: str, block: Tensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> None:
        """A block of a tensor of `shape`, which begins at `offset` in it. There may be several of one tensor."""
        self._keep(name, block.detach(), {"shape": list(shape), "offset": list(offset)})

    def write(self) -> tuple[str, ...]:
        """Write what is left, down to the disk; names of all files. Raises CheckpointError."""
        self._flush()
        return tuple(self._files)

    def _keep(self, name: str, piece: Tensor, extent: PieceExtent) -> None:
        if self._only is not None and name not in self._only:
            return
        pieces = next((pieces for pieces in self._pending if name not in pieces), None)
        if pieces is None:
            pieces = {}
            self._pending.append(pieces)
        pieces[name] = (piece.cpu().contiguous(), extent)
        self._nbytes += piece.nbytes
        if self._nbytes >= FILE_BYTES:
            self._flush()

    def _flush(self) -> None:
        for pieces in self._pending:
            number = len(self._files) // 2
            stem = f"rank_{self._rank:05d}" + (f"_{number:03d}" if number else "")
            weights, extents = self._folder / f"{stem}.safetensors", self._folder / f"{stem}.json"
            with writing(weights):
                self._folder.mkdir(parents=True, exist_ok=True)
                save_tensors({name: piece for name, (piece, _) in pieces.items()}, weights)
                sync(weights)
            write_text(extents, json.dumps({name: extent for name, (_, extent) in pieces.items()}, indent=1))
            self._files += [weights.name, extents.name]
        self._pending, self._nbytes = [], 0


class ShardReader:
    """The tensors that the ranks of a part wrote into `folder`, read piece by piece as they are asked for."""

    def __init__(self, folder: Path):
        """Raises CheckpointError when a file is missing or damaged."""
        self._folder = folder
        self._pieces: dict[str, list[tuple[Path, PieceExtent]]] = {}
        for file in sorted(folder.glob(EXTENTS)):
            weights = file.with_suffix(".safetensors")
            if not weights.is_file():
                raise CheckpointError(f"{weights} is missing beside {file.name}: the checkpoint is incomplete")
            for name, extent in read_extents(file).items():
                self._pieces.setdefault(name, []).append((weights, extent))

    @staticmethod
    def holds(folder: Path) -> bool:
        """Whether the folder has files of this form."""
        return next(folder.glob(EXTENTS), None) is not None

    @property
    def names(self) -> list[str]:
        """All tensors, in the order of writing."""
        return list(self._pieces)

    def whole(self, name: str) -> Tensor:
        """The whole tensor. Raises CheckpointError when a piece is missing or does not fit."""
        whole, filled = None, 0
        for file, extent in self._of(name):
            if whole is None:
                self._require_room(name, extent["shape"])
            piece = _read(file, name)
            whole = torch.empty(extent["shape"], dtype=piece.dtype) if whole is None else whole
            _put(piece, whole, extent, f"{file}: {name}")
            filled += piece.numel()
        assert whole is not None  # a name has a piece at least
        if filled != whole.numel():
            raise CheckpointError(
                f"{self._folder}: the pieces of {name} hold {filled} values, but its shape {list(whole.shape)} "
                f"has {whole.numel()}: a rank's file is missing or was added twice"
            )
        return whole

    def _require_room(self, name: str, shape: Sequence[int]) -> None:
        """Raise CheckpointError for a shape of more values than the files have bytes, before memory is taken for it."""
        held = sum(file.stat().st_size for file in {file for file, _ in self._of(name)})
        if prod(shape) > held:
            raise CheckpointError(
                f"{self._folder}: {name} has the shape {list(shape)}, and the files with its pieces {held} bytes: a "
                "rank's file is missing, or says something else than was written"
            )

    def like(self, name: str, held: Tensor) -> Tensor:
        """This rank's share of the tensor if it is laid out as `held`: a slice for a DTensor, else all of it.

        Raises CheckpointError when the tensor was saved with another shape, is missing or is incomplete.
        """
        shape = self._of(name)[0][1]["shape"]
        if shape != list(held.shape):
            raise CheckpointError(
                f"{self._folder}: {name} was saved with shape {shape}, but here it has {list(held.shape)}: "
                "the checkpoint is of another model. Resume with the model that it was trained from"
            )
        if not _is_sharded(held):
            return self.whole(name)
        return self._slice(name, held)

    def flat(self, name: str, start: int, count: int) -> Tensor:
        """`count` elements of the tensor from its `start`-th on in row-major order, from whatever pieces hold them."""
        for file, extent in self._of(name):
            if extent.get("flat") == start:
                piece = _read(file, name)
                if piece.numel() == count:
                    return piece
        return self.whole(name).flatten()[start : start + count].clone()

    def block(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """The block of the tensor that begins at `offset` and has `shape`, read from the pieces that overlap it alone.

        Raises CheckpointError when they do not fill it.
        """
        found, filled = None, 0
        for file, extent in self._of(name):
            if "flat" in extent:
                return self.whole(name)[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))].clone()
            with reading(file), safe_open(file, framework="pt") as pieces:
                piece = pieces.get_slice(name)
                there, here = _overlap(extent["offset"], piece.get_shape(), offset, shape)
                if here is not None:
                    values = piece[there]
                    found = torch.empty(shape, dtype=values.dtype) if found is None else found
                    found[here] = values
                    filled += values.numel()
        if found is None or filled != found.numel():
            raise CheckpointError(
                f"{self._folder}: the pieces of {name} fill {filled} values of its block of {list(shape)} at "
                f"{list(offset)}: a rank's file is missing, or the checkpoint is of another model"
            )
        return found

    def _slice(self, name: str, held: DTensor) -> Tensor:
        shape, offset = compute_local_shape_and_global_offset(held.shape, held.device_mesh, held.placements)
        if not any(isinstance(placement, _StridedShard) for placement in held.placements):
            for file, extent in self._of(name):
                if extent.get("offset") == list(offset):
                    piece = _read(file, name)
                    if piece.shape == torch.Size(shape):
                        return piece
        # Each rank cuts its own slice out of the whole: no communication, so ranks need not come here together.
        whole = self.whole(name).to(held.device)
        return distribute_tensor(whole, held.device_mesh, held.placements, src_data_rank=None).to_local()

    def _of(self, name: str) -> list[tuple[Path, PieceExtent]]:
        if name not in self._pieces:
            raise CheckpointError(
                f"{self._folder} holds no {name}: the checkpoint is of another model, or a rank's file is missing"
            )
        return self._pieces[name]


def save_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write a safetensors file with the permissions of any new file: the library lets only the owner read it."""
    file.touch()
    mode = file.stat().st_mode
    save_file(dict(tensors), file)
    file.chmod(mode)


def save_shards(weights: Mapping[str, Tensor], folder: Path, rank: int) -> tuple[str, ...]:
    """Write a part's weights, on rank 0 all that it holds, on others only their own slices; names of the files."""
    writer = ShardWriter(folder, rank)
    for name, weight in weights.items():
        writer.add(name, weight)
    return writer.write()


def _is_sharded(tensor: Tensor) -> TypeGuard[DTensor]:
    return isinstance(tensor, DTensor) and not all(p.is_replicate() for p in tensor.placements)


def _read(file: Path, name: str) -> Tensor:
    with reading(file), safe_open(file, framework="pt") as pieces:
        return pieces.get_tensor(name)


def _overlap(
    there: Sequence[int], lengths: Sequence[int], here: Sequence[int], wanted: Sequence[int]
) -> tuple[tuple[slice, ...], tuple[slice, ...] | None]:
    """Of a block of `lengths` at `there` and one of `wanted` at `here`: their common part in each; None: they have
    none."""
    begins = [max(a, b) for a, b in zip(there, here, strict=True)]
    ends = [min(a + n, b + m) for a, n, b, m in zip(there, lengths, here, wanted, strict=True)]
    if any(begin >= end for begin, end in zip(begins, ends, strict=True)):
        return (), None
    cut: Callable[[Sequence[int]], tuple[slice, ...]] = lambda origin: tuple(
        slice(b - o, e - o) for b, e, o in zip(begins, ends, origin, strict=True)
    )
    return cut(there), cut(here)


def _own_piece(weight: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """This rank's slice of a weight, and where in the whole it begins."""
    if not isinstance(weight, DTensor):
        return weight, (0,) * weight.ndim
    # A rank of a fused weight holds a slice of each half, which is no block of the whole: exchanged for one here,
    # on all tensor ranks at once.
    blocks = tuple(Shard(p.dim) if isinstance(p, _StridedShard) else p for p in weight.placements)
    local = weight.to_local()
    if blocks != weight.placements:
        sent = local.view(torch.bfloat16) if local.dtype == torch.int16 else local  # no library sends 16-bit integers
        mesh, shape, stride = weight.device_mesh, weight.shape, weight.stride()
        held = DTensor.from_local(sent, mesh, weight.placements, shape=shape, stride=stride)
        local = held.redistribute(placements=blocks).to_local().view(local.dtype)
    _, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, blocks)
    return local, tuple(offset)


def _put(piece: Tensor, whole: Tensor, extent: PieceExtent, where: str) -> None:
    fits = list(whole.shape) == extent["shape"]
    if "flat" in extent:
        begin = extent["flat"]
        if fits and begin + piece.numel() <= whole.numel():
            whole.view(-1)[begin : begin + piece.numel()] = piece
            return
    else:
        ends = [o + n for o, n in zip(extent["offset"], piece.shape, strict=True)]
        if fits and all(e <= n for e, n in zip(ends, whole.shape, strict=True)):
            whole[tuple(slice(o, e) for o, e in zip(extent["offset"], ends, strict=True))] = piece
            return
    raise CheckpointError(
        f"{where}: a piece of shape {list(piece.shape)} at {extent.get('offset', extent.get('flat'))} of "
        f"{extent['shape']} does not fit the weight's {list(whole.shape)}: the files belong to different checkpoints"
    )
