"""What a checkpoint says of itself: checkpoint.json, with the size and the checksum of each of its files."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any
from zlib import crc32

from dhp.checkpoint.files import CHECKSUM, check_part, damaged, read_json, reading, write_text
from dhp.config.parts import PARTS
from dhp.core.errors import CheckpointError
from dhp.core.process import say_nothing
from dhp.core.reports import WrittenFile

ABOUT = "checkpoint.json"
MODEL = "model"  # configuration, tokenizer and processors of the model, without weights
OPTIMIZER = "optimizer"  # in each part's folder
FILES = "files"  # in checkpoint.json: bytes and checksum of each of the others
FORMAT = "format"
NEWEST = 2  # format 1 has no number, and sizes alone
RESUMED = ("step", "parts", "settings", "skipped_samples", "data", FILES)  # what a resume needs of checkpoint.json

_BYTES = "bytes"
_TYPES = {"step": int, "parts": list, "settings": dict, "skipped_samples": int, "data": dict, FILES: dict}
_CHUNK = 1 << 20
_LARGE = 1 << 30  # bytes, from which on it is said that they are read


class LaterFormat(CheckpointError):
    """A checkpoint of a later release. Nothing is wrong with it, so no older one stands in for it."""


def write_about(folder: Path, about: Mapping[str, Any], files: Iterable[WrittenFile]) -> None:
    """Write checkpoint.json, the last of a checkpoint's files. Raises CheckpointError."""
    listed = {one.name: {_BYTES: one.nbytes, CHECKSUM: one.crc32} for one in sorted(files, key=lambda one: one.name)}
    values = {FORMAT: NEWEST} | dict(about) | {FILES: listed}
    write_text(folder / ABOUT, json.dumps(values | {CHECKSUM: _own_checksum(values)}, indent=2) + "\n")


def read_about(checkpoint: Path, needed: Sequence[str] = ("step",)) -> dict[str, Any]:
    """The contents of checkpoint.json: format, step, model_name, parts, settings, skipped_samples, data, files, crc32.

    Raises CheckpointError when the file is damaged, of a later format, lacks one of `needed`, or names what is no part
    of a model or is outside the checkpoint.
    """
    file = checkpoint / ABOUT
    if not file.is_file() and checkpoint.is_dir():
        raise CheckpointError(f"{file} is missing: without it nothing says whether the checkpoint is whole")
    about = read_json(file)
    number = about.get(FORMAT, 1)
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise damaged(file, f"{FORMAT} should be a number from 1 on, and is {number!r:.200}")
    if number > 1 and about.get(CHECKSUM) != _own_checksum(about):
        raise damaged(file, "its crc32 is not that of what it says")
    if number > NEWEST:
        raise LaterFormat(
            f"{checkpoint} has format {number}, and this release of dhp reads formats up to {NEWEST}: a later release "
            "wrote it. Use that release; nothing was changed"
        )
    for name in needed:
        kind = _TYPES[name]
        value = about.get(name)
        if not isinstance(value, kind) or isinstance(value, bool) or (isinstance(value, int) and value < 0):
            raise damaged(file, f"{name} should be {kind.__name__}, and is {about.get(name, 'missing')!r:.200}")
    for part in about.get("parts", ()):
        if part not in PARTS:
            raise damaged(file, f"parts has {part!r:.200}, which is no part of a model")
    for name, listed in about.get(FILES, {}).items():
        if not _is_inside(name) or not all(type(n) is int and n >= 0 for n in _listed(listed, number)):
            raise damaged(file, f"files has {name!r:.200} of {listed!r:.200}")
    return about


def check_checkpoint(checkpoint: Path, say: Callable[[str], None] = say_nothing, contents: bool = True) -> None:
    """Raise CheckpointError, naming the file, unless everything in it is as it was written and can be read.

    contents: all bytes are read and summed up; else sizes, headers and extents are looked at alone, as they are of a
    checkpoint of format 1, which has no checksums. say: receives a line before much is read.
    """
    about = read_about(checkpoint, RESUMED)
    sizes = {name: _listed(listed, about.get(FORMAT, 1)) for name, listed in about[FILES].items()}
    for name, (size, *_) in sizes.items():  # a copy that was cut off lacks some that no other file mentions
        with reading(checkpoint / name):
            found = (checkpoint / name).stat().st_size
        if found != size:
            raise damaged(checkpoint / name, f"it has {found} bytes of {size}")
    if contents:
        _check_sums(checkpoint, {name: sums[0] for name, (_, *sums) in sizes.items() if sums}, say)
    for part in about["parts"]:
        folder = checkpoint / str(part)
        check_part(folder)
        check_part(folder / OPTIMIZER)
    for file in sorted((checkpoint / MODEL).glob("*.json")):
        read_json(file)


def has_checksums(about: Mapping[str, Any]) -> bool:
    """Whether the files of a checkpoint have checksums: from format 2 on."""
    return bool(about.get(FORMAT, 1) >= 2)


def file_checksum(file: Path) -> int:
    """The crc32 of a file's bytes. Raises OSError."""
    checksum = 0
    with open(file, "rb", buffering=0) as opened:
        while chunk := opened.read(_CHUNK):
            checksum = crc32(chunk, checksum)
    return checksum


def _check_sums(checkpoint: Path, sums: Mapping[str, int], say: Callable[[str], None]) -> None:
    total = sum((checkpoint / name).stat().st_size for name in sums)
    if total >= _LARGE:
        say(f"reading {total / 1e9:.1f} GB of {checkpoint.name} to compare checksums")

    def check(name: str) -> None:
        file = checkpoint / name
        with reading(file):
            found = file_checksum(file)
        if found != sums[name]:
            raise damaged(file, f"its crc32 is {found:08x}, and {sums[name]:08x} was written")

    with ThreadPoolExecutor(min(8, 2 * (os.cpu_count() or 1))) as pool:  # reading and summing leave Python's lock
        for _ in pool.map(check, sums):
            pass


def _own_checksum(about: Mapping[str, Any]) -> int:
    """Of what checkpoint.json says, but for the checksum itself, however it is laid out in lines."""
    values = {key: value for key, value in about.items() if key != CHECKSUM}
    return crc32(json.dumps(values, sort_keys=True, separators=(",", ":")).encode())


def _listed(listed: Any, number: int) -> tuple[Any, ...]:
    """Bytes of a file, and from format 2 on its checksum, as checkpoint.json lists them."""
    if number == 1:
        return (listed,)
    return (listed.get(_BYTES), listed.get(CHECKSUM)) if isinstance(listed, dict) else (None,)


def _is_inside(name: str) -> bool:
    """Whether a name in a file leads to somewhere below the file's own folder."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and "\0" not in name
