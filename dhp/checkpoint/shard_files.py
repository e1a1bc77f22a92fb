"""Writes and checks a checkpoint's files; regions of tensors."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError

from dhp.core.errors import CheckpointError

_PAIRS = 512  # pieces of one tensor up to which each pair is compared


@dataclass(frozen=True)
class RegionBlock:
    """The elements from `offset` on, `shape` of them along each dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """Elements."""
        return prod(self.shape)

    def common(self, other: RegionBlock) -> RegionBlock | None:
        """The elements of both; None: there are none."""
        begins = tuple(map(max, self.offset, other.offset))
        ends = map(min, self._ends(), other._ends())
        shape = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        return None if any(n <= 0 for n in shape) else RegionBlock(begins, shape)

    def slices(self, outer: RegionBlock) -> tuple[slice, ...]:
        """Where these elements are in a tensor that holds those of `outer`."""
        begins = [own - of for own, of in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(begin, begin + n) for begin, n in zip(begins, self.shape, strict=True))

    def _ends(self) -> Iterator[int]:
        return (begin + n for begin, n in zip(self.offset, self.shape, strict=True))


def whole(shape: Sequence[int]) -> RegionBlock:
    """All elements of a tensor."""
    return RegionBlock((0,) * len(shape), tuple(shape))


def blocks_of_range(shape: Sequence[int], start: int, count: int) -> list[RegionBlock]:
    """The blocks that `count` elements from the `start`-th on are, in that order: at most two a dimension, and one.

    Each has full extent in all dimensions behind its first one that is longer than 1, so that its elements are
    consecutive in the tensor."""
    return list(_blocks(tuple(shape), start, start + count, ()))


def _blocks(shape: tuple[int, ...], first: int, last: int, prefix: tuple[int, ...]) -> Iterator[RegionBlock]:
    """prefix: the indices of the dimensions before those of `shape`."""
    if first >= last:
        return
    ones = (1,) * len(prefix)
    if not shape:
        yield RegionBlock(prefix, ones)
        return
    length, rest = prod(shape[1:]), shape[1:]
    row, begin = divmod(first, length)
    end_row, end = divmod(last, length)
    if row == end_row:
        yield from _blocks(rest, begin, end, (*prefix, row))
        return
    if begin:
        yield from _blocks(rest, begin, length, (*prefix, row))
        row += 1
    if row < end_row:
        yield RegionBlock((*prefix, row, *(0 for _ in rest)), (*ones, end_row - row, *rest))
    yield from _blocks(rest, 0, end, (*prefix, end_row))


def overlap(blocks: Sequence[RegionBlock]) -> bool:
    """Whether two of the blocks have an element in common. Of very many, blocks that begin at one place are looked
    for."""
    filled = [block for block in blocks if block.count]
    if len(filled) > _PAIRS:
        return len({block.offset for block in filled}) < len(filled)
    if len(filled) < 2 or not filled[0].shape:
        return len(filled) > 1
    begins = np.array([block.offset for block in filled])
    ends = begins + np.array([block.shape for block in filled])
    common = np.minimum(ends[:, None], ends[None]) > np.maximum(begins[:, None], begins[None])
    return int(common.all(axis=2).sum()) > len(filled)  # each meets itself


REMEDY = "Resume from an earlier checkpoint (training.resume=auto finds the newest one that is whole)"
CHECKSUM = "crc32"  # of a piece's bytes, of a file's
_DAMAGE = (errno.EIO, errno.EISDIR, errno.ENOTDIR)  # of errors of a file system, those that are no passing ones
NO_SYNC = (errno.EINVAL, errno.ENOTSUP)  # of file systems that cannot do it for a directory


class Unreadable(CheckpointError):
    """A file that its system does not give out now, though it may be sound: nothing is set aside for it."""


def damaged(file: Path, reason: object) -> CheckpointError:
    """The error for a file that is not what a run wrote."""
    return CheckpointError(f"{file} is damaged ({reason}). {REMEDY}")


@contextmanager
def reading(file: Path) -> Iterator[None]:
    """Turn what a library says of an empty, cut or overwritten file into CheckpointError with the file's name."""
    try:
        yield
    except FileNotFoundError as error:
        raise CheckpointError(f"{file} is missing: the checkpoint is incomplete. {REMEDY}") from error
    except OSError as error:
        kind = CheckpointError if error.errno in _DAMAGE else Unreadable
        raise kind(f"{file} cannot be read ({error.strerror or error}). {REMEDY}") from error
    except (SafetensorError, ValueError) as error:
        raise damaged(file, error) from error


@contextmanager
def writing(file: Path) -> Iterator[None]:
    """Turn a full disk, or another failure to write, into CheckpointError with the file's name."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"{file} cannot be written ({reason}); the checkpoint is not there. Make room, or set another "
            "training.checkpoint_dir; training.resume continues from the last one that is complete"
        ) from error


def read_json(file: Path) -> dict[str, Any]:
    """An object of JSON. Raises CheckpointError when it is none."""
    with reading(file):
        values = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise damaged(file, f"an object of JSON is expected, and it holds {type(values).__name__}")
    return values


def write_text(file: Path, text: str) -> None:
    """Write a file and wait until it is on the disk. Raises CheckpointError."""
    with writing(file):
        file.write_text(text, encoding="utf-8")
        sync(file)


def sync(path: Path) -> None:
    """Wait until a file, or the names in a directory, are on the disk. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise
    finally:
        os.close(handle)


_LONGEST_HEADER = 100_000_000  # bytes; the format's own limit


def check_part(folder: Path) -> None:
    """Raise CheckpointError unless the files of a part's ranks are readable and their pieces fill every tensor, each
    element once."""
    files = sorted(folder.glob("rank_*.json"))
    if not files:
        raise CheckpointError(f"{folder} holds no rank_*.json: it is no part of a checkpoint, or its files are lost")
    held: dict[str, list[RegionBlock]] = {}
    wanted: dict[str, int] = {}
    for file in files:
        weights = file.with_suffix(".safetensors")
        shapes = read_header(weights)
        for name, extent in read_extents(file).items():
            if name not in shapes:
                raise damaged(weights, f"{name} is missing, which {file.name} has")
            if "flat" in extent:
                blocks = blocks_of_range(extent["shape"], extent["flat"], prod(shapes[name]))
            else:
                blocks = [RegionBlock(tuple(extent["offset"]), tuple(shapes[name]))]
            held.setdefault(name, []).extend(blocks)
            wanted[name] = prod(extent["shape"])
    for name, count in wanted.items():
        found = sum(block.count for block in held[name])
        if found < count:
            raise CheckpointError(
                f"{folder}: the pieces of {name} hold {found} values of {count}: a rank's file is missing"
            )
        if overlap(held[name]):
            raise CheckpointError(
                f"{folder}: two pieces of {name} hold the same values of it: a rank's file was put in place of another"
            )


def read_header(file: Path) -> dict[str, list[int]]:
    """The shapes in a safetensors file by name. Raises CheckpointError when it is cut, empty or of another kind."""
    with reading(file), open(file, "rb") as opened:
        size = file.stat().st_size
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or not 0 < length <= min(size - 8, _LONGEST_HEADER):
            raise ValueError(f"no header: it has {size} bytes")
        header = json.loads(opened.read(length))
        tensors = {name: about for name, about in header.items() if name != "__metadata__"}
        try:
            shapes = {name: list(about["shape"]) for name, about in tensors.items()}
            end = 8 + length + max((about["data_offsets"][1] for about in tensors.values()), default=0)
        except (AttributeError, KeyError, TypeError, IndexError) as error:
            raise ValueError(f"its header is not that of safetensors: {error!r}") from error
    if size != end:
        raise damaged(file, f"it has {size} bytes, and its header says {end}")
    return shapes


def read_extents(file: Path) -> dict[str, dict[str, Any]]:
    """The extent of each piece of a rank's file, by name. Raises CheckpointError when the file says something else."""
    extents = read_json(file)
    for name, extent in extents.items():
        if not _is_extent(extent):
            raise damaged(file, f"{name} has no shape with an offset or a beginning in it")
    return extents


def _is_extent(extent: object) -> bool:
    if not isinstance(extent, dict) or not _are_numbers(extent.get("shape")):
        return False
    if not _are_numbers([extent.get(CHECKSUM, 0)]) or not isinstance(extent.get("dtype", ""), str):
        return False
    if "flat" in extent:
        return _are_numbers([extent["flat"]])
    return _are_numbers(extent.get("offset")) and len(extent["offset"]) == len(extent["shape"])


def _are_numbers(values: object) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
