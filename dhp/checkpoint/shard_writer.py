"""Writes a part's tensors and checksums, beside training if asked."""

import json
import os
import threading
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeGuard
from zlib import crc32

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from dhp.checkpoint.shard_files import NO_SYNC, RegionBlock, write_text, writing
from dhp.core.errors import CheckpointError
from dhp.core.reports import SavedShare, WrittenFile

_POLYNOMIAL = 0xEDB88320  # of crc32; the coefficient of x⁰ is the highest bit
_ONE = 1 << 31


def join(first: int, second: int, nbytes: int) -> int:
    """The crc32 of bytes with the crc32 `first`, and `nbytes` more with the crc32 `second`."""
    return _multiply(_shift(nbytes), first) ^ second


@lru_cache(maxsize=4096)  # tensors of one size are many
def _shift(nbytes: int) -> int:
    """x to the power of the bits of so many bytes."""
    found, power, count = _ONE, 1 << 23, nbytes  # x⁸
    while count:
        if count & 1:
            found = _multiply(power, found)
        power, count = _multiply(power, power), count >> 1
    return found


def _multiply(a: int, b: int) -> int:
    found = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            found ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return found


# The format's names (https://github.com/huggingface/safetensors).
NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_CHUNK = 16 << 20  # bytes that are summed and written at a time: they are still in the processor's cache


def write_tensors(tensors: Mapping[str, Tensor], file: Path) -> tuple[WrittenFile, dict[str, int]]:
    """Write tensors of the host, down to the disk; the file, and the crc32 of each tensor's bytes. Raises OSError."""
    # By falling size of an element, which aligns each one; the header's end is aligned to 8 bytes by the format.
    ordered = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header, end = {}, 0
    for name in ordered:
        begin, end = end, end + tensors[name].nbytes
        shape = list(tensors[name].shape)
        header[name] = {"dtype": NAMES[tensors[name].dtype], "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    checksum, sums = crc32(head), {}
    with open(file, "wb", buffering=0) as opened:
        _write(opened.fileno(), memoryview(head))
        for name in ordered:
            own = 0
            values = _bytes(tensors[name])
            for begin in range(0, len(values), _CHUNK):
                chunk = values[begin : begin + _CHUNK]
                own = crc32(chunk, own)
                _write(opened.fileno(), chunk)
            sums[name], checksum = own, join(checksum, own, len(values))
        try:
            os.fsync(opened.fileno())
        except OSError as error:
            if error.errno not in NO_SYNC:
                raise
    return WrittenFile(file.name, len(head) + end, checksum), sums


def checksum_of(tensor: Tensor) -> int:
    """The crc32 of a tensor's bytes, as files have them."""
    return crc32(_bytes(tensor))


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _write(handle: int, content: memoryview) -> None:
    while content:  # a system call may write less than it is given, always so beyond 2 GiB
        content = content[os.write(handle, content) :]


# {"shape": of the whole, and "offset": of a block in it, or "flat": of a range of its elements; "dtype", "crc32"}
PieceExtent = dict[str, Any]

FILE_BYTES = 256 << 20  # of pieces in one file

_Pieces = dict[str, tuple[Tensor, PieceExtent]]


def on_host(key: str, piece: Tensor) -> Tensor:
    """A piece in host memory, which is not copied where it lies there already."""
    return piece.cpu().contiguous()


class ShardWriter:
    """Writes what one rank holds into `rank_NNNNN.safetensors`, further ones `rank_NNNNN_NNN.safetensors`, and next to
    each a `.json`.

    Without `keep`, a file is written as soon as there is enough for one, so that no more than about `FILE_BYTES` is in
    host memory. With it, pieces are kept, and nothing is written before `write`, which any thread may call: it
    touches only what was kept."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        stage_rank: int | None = None,
        only: Collection[str] | None = None,
        keep: Callable[[str, Tensor], Tensor] | None = None,
        once: bool | None = None,
    ):
        """rank: its number in the part, whose stages hold different layers. stage_rank: its number in the stage;
        None: the part is one stage. only: names that are written of all that are added; None: all. keep: copies a
        piece, by a key of its own, to memory that stays as it is until `write` has ended. once: this rank writes what
        all ranks of the part have alike; None: the part's first one does."""
        self._folder, self._rank, self._only = folder, rank, only
        self._stage_rank = rank if stage_rank is None else stage_rank
        self._once = not rank if once is None else once
        self._keeps, self._copy = keep is not None, keep or on_host
        self._full: list[_Pieces] = []  # by file; a file has one piece of a tensor
        self._open: list[_Pieces] = []
        self._nbytes = 0
        self._counts: dict[str, int] = {}  # pieces of each tensor
        self._files: list[WrittenFile] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """A plain tensor, the same on all ranks of the stage, of which the first writes it; or a DTensor, of which each
        rank writes its slice that has it together with the first: others have the same slices. Ranks that have all
        experts together have some of the other slices alike."""
        if not is_cut(tensor):
            if not self._stage_rank:
                local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
                self.add_block(name, local, (0,) * tensor.ndim, tuple(tensor.shape))
            return
        if not bool((tensor.device_mesh.mesh == 0).any()):
            return
        local = tensor.to_local().detach()
        for block, here in held_blocks(tensor):
            self.add_block(name, local[here], block.offset, tuple(tensor.shape))

    def add_once(self, name: str, tensor: Tensor) -> None:
        """A tensor that is the same on all ranks of the part, of which one writes it."""
        if self._once:
            self.add(name, tensor)

    def add_flat(self, name: str, elements: Tensor, start: int, shape: tuple[int, ...]) -> None:
        """Consecutive elements of a tensor of `shape`, from its `start`-th on in row-major order."""
        self._add(name, elements.detach(), {"shape": list(shape), "flat": start})

    def add_block(self, name: str, block: Tensor, offset: tuple[int, ...], shape: tuple[int, ...]) -> None:
        """A block of a tensor of `shape`, which begins at `offset` in it. There may be several of one tensor."""
        self._add(name, block.detach(), {"shape": list(shape), "offset": list(offset)})

    def write(self) -> tuple[WrittenFile, ...]:
        """Write what is left, down to the disk; all files. Raises CheckpointError."""
        self._close()
        self._flush()
        return tuple(self._files)

    def _add(self, name: str, piece: Tensor, extent: PieceExtent) -> None:
        if self._only is not None and name not in self._only:
            return
        pieces = next((pieces for pieces in self._open if name not in pieces), None)
        if pieces is None:
            pieces = {}
            self._open.append(pieces)
        number = self._counts.get(name, 0)
        self._counts[name] = number + 1
        key = f"{self._folder.name}/{name}/{number}"
        pieces[name] = (self._copy(key, piece), extent | {"dtype": NAMES[piece.dtype]})
        self._nbytes += piece.nbytes
        if self._nbytes >= FILE_BYTES:
            self._close()
            if not self._keeps:
                self._flush()

    def _close(self) -> None:
        self._full, self._open, self._nbytes = self._full + self._open, [], 0

    def _flush(self) -> None:
        for pieces in self._full:
            number = len(self._files) // 2
            stem = f"rank_{self._rank:05d}" + (f"_{number:03d}" if number else "")
            weights, extents = self._folder / f"{stem}.safetensors", self._folder / f"{stem}.json"
            with writing(weights):
                self._folder.mkdir(parents=True, exist_ok=True)
                written, sums = write_tensors({name: piece for name, (piece, _) in pieces.items()}, weights)
            about = {name: extent | {"crc32": sums[name]} for name, (_, extent) in pieces.items()}
            self._files += [written, write_json(extents, about)]
        self._full = []


Piece = tuple[
    str, PieceExtent, Tensor
]  # of a tensor of that name; its values on the host, without any where nobody asks


class PieceSink(ShardWriter):
    """Keeps what a rank would write of the tensors `only`; None: of all, without values."""

    def __init__(self, stage_rank: int, only: Collection[str] | None):
        super().__init__(Path(), stage_rank, only=only)
        self.pieces: list[Piece] = []

    def _add(self, name: str, piece: Tensor, extent: PieceExtent) -> None:
        if self._only is None or name in self._only:
            values = (
                torch.empty(0, dtype=piece.dtype) if self._only is None else piece.to("cpu", copy=True).contiguous()
            )
            self.pieces.append((name, extent, values))


def write_json(file: Path, values: Mapping[str, Any]) -> WrittenFile:
    """Write an object of JSON, down to the disk. Raises CheckpointError."""
    text = json.dumps(values, indent=1)
    write_text(file, text)
    return WrittenFile(file.name, len(text.encode()), crc32(text.encode()))


def save_tensors(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Write a safetensors file with the permissions of any new file: the library lets only the owner read it."""
    file.touch()
    mode = file.stat().st_mode
    save_file(dict(tensors), file)
    file.chmod(mode)


def save_shards(weights: Mapping[str, Tensor], folder: Path, rank: int) -> tuple[WrittenFile, ...]:
    """Write a part's weights, on rank 0 all that it holds, on others only their own slices; the files."""
    writer = ShardWriter(folder, rank)
    for name, weight in weights.items():
        writer.add(name, weight)
    return writer.write()


def is_cut(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether ranks hold different elements of a tensor."""
    return isinstance(tensor, DTensor) and not all(p.is_replicate() for p in tensor.placements)


def held_blocks(tensor: DTensor) -> list[tuple[RegionBlock, tuple[slice, ...]]]:
    """The blocks of a whole tensor that this rank holds, and where each lies in its local tensor. One, or of a fused
    matrix, of which a rank has a slice of each part, as many as there are parts."""
    found: list[tuple[tuple[int, ...], tuple[int, ...], tuple[slice, ...]]] = [((), (), ())]
    for dim, length in enumerate(tensor.shape):
        runs = list(_runs(_held_indices(tensor, dim, length)))
        found = [
            ((*offset, begin), (*shape, count), (*here, slice(at, at + count)))
            for offset, shape, here in found
            for begin, count, at in runs
        ]
    return [(RegionBlock(offset, shape), here) for offset, shape, here in found]


def _held_indices(tensor: DTensor, dim: int, length: int) -> Tensor:
    """Indices along a dimension that this rank holds, in the order of its local tensor."""
    indices = torch.arange(length).view([length if of == dim else 1 for of in range(tensor.ndim)])
    placement: Any
    for of_mesh, placement in enumerate(tensor.placements):
        if getattr(placement, "dim", None) == dim:  # `_StridedShard` says that it is no Shard
            count, own = tensor.device_mesh.size(of_mesh), tensor.device_mesh.get_local_rank(of_mesh)
            pieces, _ = placement._split_tensor(indices, count, with_padding=False, contiguous=True)
            indices = pieces[own]
    return indices.flatten()


def _runs(indices: Tensor) -> list[tuple[int, int, int]]:
    """Runs of consecutive indices: the first, how many, and where in the list they begin."""
    if not len(indices):
        return []
    breaks = (torch.nonzero(indices.diff() != 1).flatten() + 1).tolist()
    begins, ends = [0, *breaks], [*breaks, len(indices)]
    return [(int(indices[begin]), end - begin, begin) for begin, end in zip(begins, ends, strict=True)]


Write = Callable[[], tuple[WrittenFile, ...]]


class BackgroundWriter:
    """One at a time: `keep` the tensors, `begin`, and `take` until it is done."""

    def __init__(self, pinned: bool = False) -> None:
        """pinned: the copies are in memory that a GPU writes to without help."""
        self._pinned = pinned
        self._buffers: dict[str, Tensor] = {}
        self._used: set[str] = set()
        self._thread: threading.Thread | None = None
        self._saved: SavedShare | None = None
        self._raised: BaseException | None = None

    def keep(self, key: str, piece: Tensor) -> Tensor:
        """A copy of a tensor in host memory. It stays as it is until the next `keep` of the key."""
        buffer = self._buffers.get(key)
        if buffer is None or buffer.shape != piece.shape or buffer.dtype != piece.dtype:
            buffer = torch.empty(piece.shape, dtype=piece.dtype, pin_memory=self._pinned)
            self._buffers[key] = buffer
        buffer.copy_(piece, non_blocking=self._pinned)
        self._used.add(key)
        return buffer

    def begin(self, write: Write) -> None:
        """Write what was kept, in a thread. Raises RuntimeError while another checkpoint is being written."""
        if self._thread is not None:
            raise RuntimeError("a checkpoint is being written already")
        if self._pinned:
            torch.cuda.synchronize()
        for key in self._buffers.keys() - self._used:  # of tensors that are there no more
            del self._buffers[key]
        self._used = set()
        self._saved = None
        self._thread = threading.Thread(target=self._run, args=(write,), name="checkpoint", daemon=True)
        self._thread.start()

    def take(self, wait: bool) -> SavedShare | None:
        """What has been written; while it is being written, and `wait` is false, that it is not done. None: nothing was
        begun yet. Raises what writing raised, but for files that cannot be written."""
        if self._thread is not None:
            self._thread.join(None if wait else 0)
            if self._thread.is_alive():
                return SavedShare(done=False)
            self._thread = None
        if self._raised is not None:
            raised, self._raised = self._raised, None
            raise raised
        return self._saved

    @property
    def nbytes(self) -> int:
        """Bytes of host memory that it keeps."""
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def _run(self, write: Write) -> None:
        try:
            self._saved = run_write(write)
        except BaseException as error:  # a thread's exception reaches nobody by itself: `take` raises it
            self._raised = error


def run_write(write: Write) -> SavedShare:
    """The files that `write` wrote, or why it could not: a full disk ends no run."""
    try:
        return SavedShare(done=True, files=write())
    except CheckpointError as error:
        return SavedShare(done=True, error=str(error))
