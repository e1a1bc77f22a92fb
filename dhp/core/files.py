"""Writes files whole, removes folders safely, recognizes addresses."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote
from uuid import uuid4


def write_whole(path: Path, content: str | bytes) -> None:
    """Write or replace a file; its folder is made where there is none. A crash of the machine may leave it empty or
    half: there is no fsync (`dhp.checkpoint.shard_files` has one). Raises OSError."""
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

    Where another process was faster, `folder` is the one that it made. OSError when nothing can be written there."""
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

    Raises OSError."""
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


_LONGEST = 107  # bytes of a socket's path


def base_for_socket(base: str, below: str) -> str:
    """`base`, or /tmp where the path of a socket that ends in `below` would be too long in it, or it is no folder."""
    return base if len(os.path.abspath(base).encode() + below.encode()) <= _LONGEST and os.path.isdir(base) else "/tmp"


@contextmanager
def private_folder(prefix: str, socket: str = "") -> Iterator[Path]:
    """A new folder for this process, which no other user may enter, removed at the end. Folders of that prefix whose
    processes were killed go first: a living one has a lock on its folder. socket: the name of one in it, whose path
    must not be too long. Raises OSError where none can be made."""
    parent = Path(base_for_socket(tempfile.gettempdir(), f"/{prefix}12345678/{socket}"))
    for left in parent.glob(f"{prefix}*"):
        _remove_left(left)
    unnamed = Path(tempfile.mkdtemp(prefix=f".{prefix}", dir=parent))
    handle = os.open(unnamed, os.O_RDONLY)
    with suppress(OSError):  # a file system without locks: then nobody gets one, and nothing is taken for left
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    folder = unnamed.rename(parent / f"{prefix}{uuid4().hex[:8]}")  # with its lock, which goes by inode
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(handle)


def _remove_left(folder: Path) -> None:
    """Remove a folder of this user's that no living process holds."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if os.fstat(handle).st_uid == os.getuid():
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        finally:
            os.close(handle)


_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]+)://")


def scheme_of(path: str) -> str | None:
    """The scheme of an address, in lower case; None for a path."""
    found = _SCHEME.match(path)
    return None if found is None else found[1].lower()


def is_remote(path: str) -> bool:
    """Whether it is the address of something that is no file of this machine."""
    return scheme_of(path) not in (None, "file")


def without_file_scheme(path: str) -> str:
    """A file: address as the path that it stands for; all else as it is."""
    if scheme_of(path) != "file":
        return path
    return unquote(path.partition("://")[2].removeprefix("localhost"))
