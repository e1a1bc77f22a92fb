"""A temporary folder of one process, which the next one of its kind removes where it could not itself."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

_LONGEST = 107  # bytes of a socket's path


def base_for_socket(base: str, below: str) -> str:
    """`base`, or /tmp where the path of a socket that ends in `below` would be too long in it, or it is no folder."""
    return base if len(os.path.abspath(base).encode() + below.encode()) <= _LONGEST and os.path.isdir(base) else "/tmp"


@contextmanager
def own_folder(prefix: str, socket: str = "") -> Iterator[Path]:
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
