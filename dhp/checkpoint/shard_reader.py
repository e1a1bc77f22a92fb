"""Reads a checkpoint's tensors from any layout into any other."""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from dhp.checkpoint.shard_files import CHECKSUM, RegionBlock, blocks_of_range, damaged, read_extents, reading, whole
from dhp.checkpoint.shard_writer import NAMES, Piece, PieceExtent, checksum_of, held_blocks, is_cut, write_tensors
from dhp.core.errors import CheckpointError
from dhp.core.state import StateSource

EXTENTS = "rank_*.json"  # which pieces each rank wrote, beside a file of their values
_OPEN_FILES = 64  # that a reader keeps open
_DTYPES = {name: dtype for dtype, name in NAMES.items()}


@dataclass(frozen=True)
class _Piece:
    """A tensor of a file. file: with its name. blocks: of the whole tensor, one after another."""

    file: Path
    extent: PieceExtent
    shape: tuple[int, ...]
    blocks: tuple[RegionBlock, ...]


class ShardReader:
    """The tensors of one folder."""

    def __init__(self, folder: Path):
        """Raises CheckpointError when a file is missing or damaged."""
        self._folder = folder
        self._extents: dict[str, list[tuple[Path, PieceExtent]]] = {}
        self._pieces: dict[str, list[_Piece]] = {}
        self._checked: set[tuple[str, Path]] = set()
        self._opened: OrderedDict[Path, tuple[ExitStack, Any]] = OrderedDict()
        for file in sorted(folder.glob(EXTENTS)):
            weights = file.with_suffix(".safetensors")
            if not weights.is_file():
                raise CheckpointError(f"{weights} is missing beside {file.name}: the checkpoint is incomplete")
            for name, extent in read_extents(file).items():
                self._extents.setdefault(name, []).append((weights, extent))

    @staticmethod
    def holds(folder: Path) -> bool:
        """Whether the folder has files of this form."""
        return next(folder.glob(EXTENTS), None) is not None

    @property
    def names(self) -> list[str]:
        """All tensors, in the order of writing."""
        return list(self._extents)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a whole tensor. Raises CheckpointError where there is none of the name."""
        return tuple(self._of(name)[0][1]["shape"])

    def dtype(self, name: str) -> torch.dtype:
        """The number format of a tensor. Raises CheckpointError where there is none of the name."""
        file, _ = self._of(name)[0]
        with reading(file):
            return _DTYPES[self._open(file).get_slice(name).get_dtype()]

    def blocks(self, name: str) -> list[RegionBlock]:
        """The blocks of a tensor that are in files, in the order of its pieces."""
        return [block for piece in self._pieces_of(name) for block in piece.blocks]

    def whole(self, name: str) -> Tensor:
        """The whole tensor. Raises CheckpointError when a piece is missing or does not fit."""
        shape = self.shape(name)
        self._require_room(name, shape)
        return self.block(name, (0,) * len(shape), shape)

    def stored(self, name: str) -> Tensor | None:
        """The whole tensor, mapped from the file that has all of it, its values compared with their checksum; None: its
        pieces are in several places."""
        all_of_it = whole(self.shape(name))
        found = [piece for piece in self._pieces_of(name) if piece.blocks == (all_of_it,)]
        return self._read_whole(name, found[0]).view(all_of_it.shape) if len(found) == 1 else None

    def like(self, name: str, held: Tensor) -> Tensor:
        """This rank's share of the tensor if it is laid out as `held`: a slice for a DTensor, else all of it.

        Raises CheckpointError when the tensor was saved with another shape, is missing or is incomplete."""
        shape = self.shape(name)
        if shape != tuple(held.shape):
            raise CheckpointError(
                f"{self._folder}: {name} was saved with shape {list(shape)}, but here it has {list(held.shape)}: "
                "the checkpoint is of another model. Resume with the model that it was trained from"
            )
        if not is_cut(held):
            return self.whole(name)
        blocks = held_blocks(held)
        if len(blocks) == 1:
            return self.block(name, blocks[0][0].offset, blocks[0][0].shape)
        found: Tensor | None = None
        for block, here in blocks:
            values = self.block(name, block.offset, block.shape)
            found = torch.empty(held.to_local().shape, dtype=values.dtype) if found is None else found
            found[here] = values
        return self._empty(name, tuple(held.to_local().shape)) if found is None else found

    def flat(self, name: str, start: int, count: int) -> Tensor:
        """`count` elements of the tensor from its `start`-th on in row-major order. Raises CheckpointError as `block`
        does."""
        for piece in self._pieces_of(name):
            if piece.extent.get("flat") == start and piece.shape == (count,):
                return self._read_whole(name, piece)
        found, begin = self._empty(name, (count,)), 0
        for block in blocks_of_range(self.shape(name), start, count):
            self.fill(name, block, found[begin : begin + block.count].view(block.shape))
            begin += block.count
        return found

    def block(self, name: str, offset: tuple[int, ...], shape: tuple[int, ...]) -> Tensor:
        """The block of the tensor that begins at `offset` and has `shape`.

        Raises CheckpointError when the pieces do not fill it."""
        wanted = RegionBlock(tuple(offset), tuple(shape))
        for piece in self._pieces_of(name):
            if "flat" not in piece.extent and piece.blocks == (wanted,):
                return self._read_whole(name, piece)
        found = self._empty(name, wanted.shape)
        self.fill(name, wanted, found)
        return found

    def check_values(self, name: str, wanted: RegionBlock) -> None:
        """Compare the pieces that have some of a block with their checksums, each once. Raises CheckpointError for one
        that is damaged."""
        for piece in self._pieces_of(name):
            key = (name, piece.file)
            if key not in self._checked and any(wanted.common(block) for block in piece.blocks):
                self._read_whole(name, piece)
                self._checked.add(key)

    def _read_whole(self, name: str, piece: _Piece) -> Tensor:
        with reading(piece.file):
            values: Tensor = self._open(piece.file).get_tensor(name)
        checksum = piece.extent.get(CHECKSUM)
        if checksum is not None and checksum_of(values) != checksum:
            raise damaged(piece.file, f"the values of {name} are not those that were written: their crc32 differs")
        return values

    def fill(self, name: str, wanted: RegionBlock, target: Tensor) -> None:
        """Read the elements of a block into `target`, of its shape. Raises CheckpointError as `block` does."""
        filled = 0
        for piece in self._pieces_of(name):
            begin = 0
            for block in piece.blocks:
                common = wanted.common(block)
                if common is not None:
                    target[common.slices(wanted)] = self._read(name, piece, block, begin, common)
                    filled += common.count
                begin += block.count
        if filled != wanted.count:
            held = sum(block.count for piece in self._pieces_of(name) for block in piece.blocks)
            raise CheckpointError(
                f"{self._folder}: the pieces of {name} hold {held} values, but its shape {list(self.shape(name))} has "
                f"{prod(self.shape(name))}, and of its block of {list(wanted.shape)} at {list(wanted.offset)} they "
                f"fill {filled} of {wanted.count}: a rank's file is missing or was added twice"
            )

    def _read(self, name: str, piece: _Piece, block: RegionBlock, begin: int, common: RegionBlock) -> Tensor:
        """Elements of a block of a piece, in which it begins at `begin`."""
        with reading(piece.file):
            stored = self._open(piece.file).get_slice(name)
            values: Tensor
            if not piece.shape:
                values = self._open(piece.file).get_tensor(name)
                return values
            if "flat" not in piece.extent:
                values = stored[common.slices(block)]
                return values
            # Consecutive rows of the first dimension that the block has several of, with all that is behind it.
            dim = next((dim for dim, n in enumerate(block.shape) if n > 1), max(0, len(block.shape) - 1))
            length = prod(block.shape[dim + 1 :])
            if not block.shape:
                return stored[begin : begin + 1].view(())
            row = common.offset[dim] - block.offset[dim]
            rows = RegionBlock(
                (*block.offset[:dim], common.offset[dim], *block.offset[dim + 1 :]),
                (*block.shape[:dim], common.shape[dim], *block.shape[dim + 1 :]),
            )
            values = stored[begin + row * length : begin + (row + common.shape[dim]) * length]
            return values.view(rows.shape)[common.slices(rows)]

    def _open(self, file: Path) -> Any:
        """An open file of tensors; the latest ones stay open."""
        if file not in self._opened:
            if len(self._opened) >= _OPEN_FILES:
                self._opened.popitem(last=False)[1][0].close()
            stack = ExitStack()
            self._opened[file] = (stack, stack.enter_context(safe_open(file, framework="pt")))
        self._opened.move_to_end(file)
        return self._opened[file][1]

    def _empty(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Room for elements of a tensor, in its format."""
        return torch.empty(shape, dtype=self.dtype(name))

    def _pieces_of(self, name: str) -> list[_Piece]:
        if name not in self._pieces:
            self._pieces[name] = [self._piece(name, file, extent) for file, extent in self._of(name)]
        return self._pieces[name]

    def _piece(self, name: str, file: Path, extent: PieceExtent) -> _Piece:
        with reading(file):
            shape = tuple(self._open(file).get_slice(name).get_shape())
        of_whole, expected = tuple(extent["shape"]), self.shape(name)
        if "flat" in extent:
            fits = len(shape) == 1 and extent["flat"] + shape[0] <= prod(of_whole)
            blocks = blocks_of_range(of_whole, extent["flat"], shape[0]) if fits else []
        else:
            blocks = [RegionBlock(tuple(extent["offset"]), shape)]
            fits = len(shape) == len(of_whole) and whole(of_whole).common(blocks[0]) in (blocks[0], None)
            fits = fits and all(o + n <= of for o, n, of in zip(extent["offset"], shape, of_whole, strict=True))
        if not fits or of_whole != expected:
            raise CheckpointError(
                f"{file}: {name}: a piece of shape {list(shape)} at {extent.get('offset', extent.get('flat'))} of "
                f"{extent['shape']} does not fit the weight's {list(expected)}: the files belong to different "
                "checkpoints"
            )
        return _Piece(file, extent, shape, tuple(blocks))

    def _require_room(self, name: str, shape: Sequence[int]) -> None:
        """Raise CheckpointError for a shape of more values than the files have bytes, before memory is taken for it."""
        held = sum(file.stat().st_size for file in {file for file, _ in self._of(name)})
        if prod(shape) > held:
            raise CheckpointError(
                f"{self._folder}: {name} has the shape {list(shape)}, and the files with its pieces {held} bytes: a "
                "rank's file is missing, or says something else than was written"
            )

    def _of(self, name: str) -> list[tuple[Path, PieceExtent]]:
        if name not in self._extents:
            raise CheckpointError(
                f"{self._folder} holds no {name}: the checkpoint is of another model, or a rank's file is missing"
            )
        return self._extents[name]


class Reader(Protocol):
    """A form of files."""

    @staticmethod
    def holds(folder: Path) -> bool:
        """Whether the folder has files of this form."""

    def __call__(self, folder: Path) -> StateSource:
        """Its tensors. Raises CheckpointError where files are missing or damaged."""


READERS: list[Reader] = [ShardReader]  # another form of files is another line


def open_source(folder: Path) -> StateSource:
    """The tensors of a folder. Raises CheckpointError where no reader knows its files, or one finds them damaged."""
    for reader in READERS:
        if reader.holds(folder):
            return reader(folder)
    raise CheckpointError(f"{folder} holds no rank_*.json: it is no part of a checkpoint")


def stored_formats(folder: Path) -> set[str]:
    """Number formats of a part's weights, as safetensors names them; none known of a checkpoint of format 1. Raises
    CheckpointError for damaged files."""
    extents = (extent for file in sorted(folder.glob(EXTENTS)) for extent in read_extents(file).values())
    return {extent["dtype"] for extent in extents if "dtype" in extent}


def load_shards(weights: Mapping[str, Tensor], folder: Path) -> None:
    """Give a part the weights that `save_shards` wrote. Raises CheckpointError when they are not this model's."""
    reader = open_source(folder)
    with torch.no_grad():
        for name, weight in weights.items():
            local = weight.to_local() if isinstance(weight, DTensor) else weight
            local.copy_(reader.like(name, weight))


def mapped_shards(folder: Path, beside: Path, most: int = 1 << 30) -> Mapping[str, Tensor]:
    """The whole tensors of a part by name, in files that are mapped, so that they take memory only as far as there is
    some to spare: the checkpoint's own, and of those that several ranks had pieces of new ones below `beside`.

    most: bytes that are put together in memory at a time, or one tensor's. Raises CheckpointError as `read_shards`."""
    reader, found = open_source(folder), dict[str, Tensor]()
    waiting: dict[str, Tensor] = {}

    def write() -> None:
        file = beside / f"{folder.name}_{len(found)}.safetensors"
        write_tensors(waiting, file)
        with safe_open(file, framework="pt") as opened:
            found.update({name: opened.get_tensor(name) for name in waiting})
        waiting.clear()

    for name in reader.names:
        stored = reader.stored(name)
        if stored is not None:
            found[name] = stored
            continue
        waiting[name] = reader.whole(name)
        if sum(tensor.nbytes for tensor in waiting.values()) >= most:
            write()
    if waiting:
        write()
    return {name: found[name] for name in reader.names}


def read_shards(folder: Path) -> Mapping[str, Tensor]:
    """The whole tensors of a part by name.

    Raises CheckpointError when a piece is missing or does not fit."""
    reader = open_source(folder)
    return {name: reader.whole(name) for name in reader.names}


def describe_pieces(pieces: Sequence[Piece]) -> dict[str, Tensor]:
    """The tensors that ranks have such pieces of, on the meta device."""
    return {name: torch.empty(extent["shape"], dtype=of.dtype, device="meta") for name, extent, of in pieces}


def join_pieces(pieces: Sequence[Piece]) -> dict[str, Tensor]:
    """The whole tensors that ranks have sent in pieces. Raises CheckpointError where one is incomplete."""
    found, counts = dict[str, Tensor](), Counter[str]()
    for name, extent, values in pieces:
        into = found.setdefault(name, torch.empty(extent["shape"], dtype=values.dtype))
        counts[name] += values.numel()
        if "flat" in extent:
            into.view(-1)[extent["flat"] : extent["flat"] + values.numel()] = values
        else:
            into[RegionBlock(tuple(extent["offset"]), tuple(values.shape)).slices(whole(into.shape))] = values
    lacking = [name for name, tensor in found.items() if counts[name] != tensor.numel()]
    if lacking:
        raise CheckpointError(f"ranks sent {counts[lacking[0]]} of {found[lacking[0]].numel()} values of {lacking[0]}")
    return found
