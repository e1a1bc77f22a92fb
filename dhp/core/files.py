"""Files and folders: written whole or not at all, removed without following links, compared by fingerprint."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from uuid import uuid4


def write_whole(path: Path, content: str | bytes) -> None:
    """Write or replace a file; its folder is made where there is none. A crash of the machine may leave it empty or
    half: there is no fsync (`dhp.checkpoint.files` has one). Raises OSError."""
    with replaced(path) as unfinished:
        unfinished.write_bytes(content.encode() if isinstance(content, str) else content)


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A temporary path to write: takes the place of `path` when the block ends, and is removed when it raises."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        with suppress(OSError):
            unfinished.unlink()


def require_writable(folder: Path) -> None:
    """Raises OSError for a folder that cannot be made or written to."""
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / f".{uuid4().hex}.tmp"
    probe.touch()
    probe.unlink()


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A temporary path to create and fill: renamed to `folder` when the block ends, removed when it raises.

    Where another process was faster, `folder` is the one that it made. OSError when nothing can be written there.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.{uuid4().hex}")
    try:
        yield partial
        try:
            os.rename(partial, folder)
        except OSError:
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def remove(path: Path) -> None:
    """Remove a folder with all that is in it, a file, or a link as such; nothing there is no error. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


_WHOLE = 1 << 24  # bytes up to which a file is read whole
_BLOCKS, _BLOCK = 16, 1 << 12  # of a larger one so many blocks, spread over it, of so many bytes
_FILES = 64  # of more files than that as many, spread over them; of the others names and sizes


def fingerprint(files: Sequence[Path]) -> str:
    """A digest of the files' names, sizes and contents; of large ones samples. Their folder makes no difference.

    Raises OSError.
    """
    digest = hashlib.sha256()
    read = {round(number * (len(files) - 1) / (_FILES - 1)) for number in range(_FILES)}
    for number, file in enumerate(files):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode("utf-8", "surrogateescape"))
        if len(files) <= _FILES or number in read:
            with file.open("rb") as opened:
                _add(digest, opened, size)
    return f"sha256:{digest.hexdigest()[:16]}"


def fingerprint_of(name: str, size: int, opened: BinaryIO) -> str:
    """`fingerprint` of one file of that name and size, wherever it is."""
    digest = hashlib.sha256(f"{name}\0{size}\0".encode("utf-8", "surrogateescape"))
    _add(digest, opened, size)
    return f"sha256:{digest.hexdigest()[:16]}"


def _add(digest: hashlib._Hash, opened: BinaryIO, size: int) -> None:
    if size <= _WHOLE:
        digest.update(opened.read())
        return
    for number in range(_BLOCKS):
        opened.seek(number * (size - _BLOCK) // (_BLOCKS - 1))
        digest.update(opened.read(_BLOCK))
