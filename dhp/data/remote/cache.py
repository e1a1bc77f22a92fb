"""Copies of files behind addresses on the local disk, up to a limit; the least recently used ones go first.

Several processes of several runs may use a folder at once. A copy appears whole or not at all, under a name made by
hashing, so no address leads out of the folder. A copy that is open stays readable when another process removes it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from dhp.core.process import say_line

_LOCKS = 64  # files that are locked while a copy is made: who wants the same one waits for it
_POLL_S = 0.05
_ROUGH = 16  # the folder is looked through once a sixteenth of the limit was added
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM)
Fetch = Callable[[BinaryIO], None]  # writes a file's bytes


class FileCache:
    """A folder of copies. limit_bytes: the most of them; None: no limit."""

    def __init__(self, folder: Path, limit_bytes: int | None = None) -> None:
        self._folder, self._limit = folder, limit_bytes
        self._added: int | None = None  # since the folder was last looked through; None: never
        self._complained = False

    def open(self, key: str, size: int | None, fetch: Fetch, seconds: float) -> BinaryIO:
        """The copy under a key, made by `fetch` where there is none. size: of the file, if known. seconds: the longest
        wait for another process that makes the same one. Where the folder cannot be written to, reading goes on without
        it, and a line says so. Raises what `fetch` raises."""
        path = self._path(key)
        found = _opened(path, size)
        if found is not None:
            return found
        if self._limit is not None and size is not None and size > self._limit:
            return without_cache(fetch)
        try:
            with self._making(path, seconds):
                return _opened(path, size) or self._made(path, fetch)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._complain(error)
            return without_cache(fetch)

    def index(self, key: str, make: Callable[[], np.ndarray]) -> np.ndarray:
        """An array of integers that is kept under a key; made anew where there is none, or it is damaged."""
        path = self._folder / "index" / f"{_digest(key)}.npy"
        try:
            with path.open("rb") as file:
                kept: np.ndarray = np.load(file, allow_pickle=False)
            if kept.dtype == np.int64 and kept.ndim == 1:
                os.utime(path)
                return kept
        except Exception:  # damaged bytes lead NumPy to raise anything, and making it again answers all of it
            pass
        made = make()
        try:
            with self._unfinished(path) as unfinished:
                np.save(unfinished, made)
        except OSError as error:
            self._complain(error)
        return made

    def _path(self, key: str) -> Path:
        name = _digest(key)
        return self._folder / "files" / name[:2] / name

    def _made(self, path: Path, fetch: Fetch) -> BinaryIO:
        with self._unfinished(path) as unfinished:
            fetch(unfinished)
        found = path.open("rb")
        self._make_room(os.fstat(found.fileno()).st_size, path)
        return found

    @contextmanager
    def _unfinished(self, path: Path) -> Iterator[BinaryIO]:
        """A file beside the path, which it becomes if the block ends well."""
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".unfinished-")
        try:
            with os.fdopen(handle, "wb") as file:
                yield file
            os.replace(name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise

    @contextmanager
    def _making(self, path: Path, seconds: float) -> Iterator[None]:
        """Alone in making this copy; without that after so many seconds, since two do no harm."""
        locks = self._folder / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        with (locks / str(int(path.name[:8], 16) % _LOCKS)).open("a") as lock:
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if path.exists():
                        break
                    time.sleep(_POLL_S)
            yield

    def _make_room(self, size: int, kept: Path) -> None:
        """Remove the copies that were not used for longest, until the rest is within the limit; not `kept`."""
        if self._limit is None:
            return
        self._added = None if self._added is None else self._added + size
        if self._added is not None and self._added <= self._limit // _ROUGH:
            return
        self._added = 0
        with (self._folder / "locks" / "room").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = sorted(_copies(self._folder / "files"))
            total = sum(size for _, size, _ in found)
            for _, size, path in found:
                if total <= self._limit - self._limit // _ROUGH:  # room for what others add until they look, too
                    break
                if path != str(kept):
                    with suppress(OSError):
                        os.unlink(path)
                    total -= size

    def _complain(self, error: OSError) -> None:
        if not self._complained:
            self._complained = True
            reason = error.strerror or error
            line = (
                f"data.cache_dir: {self._folder} cannot be written to ({reason}); files are fetched each time instead"
            )
            say_line(line, file=sys.stderr)


_STALE_S = 86400.0  # after which what a killed process left unfinished is removed


def _copies(folder: Path) -> Iterator[tuple[float, int, str]]:
    """Last use, bytes and path of every copy."""
    for below in os.scandir(folder):
        for entry in os.scandir(below.path) if below.is_dir(follow_symlinks=False) else ():
            with suppress(OSError):  # another process has removed it
                about = entry.stat(follow_symlinks=False)
                if entry.name.startswith(".") and time.time() - about.st_mtime < _STALE_S:
                    continue
                yield about.st_mtime, about.st_size, entry.path


def _opened(path: Path, size: int | None) -> BinaryIO | None:
    """The copy, if it is there and whole; it counts as used now."""
    try:
        found = path.open("rb")
    except OSError:
        return None
    if size is not None and os.fstat(found.fileno()).st_size != size:
        found.close()
        return None
    with suppress(OSError):
        os.utime(path)
    return found


def without_cache(fetch: Fetch) -> BinaryIO:
    """What `fetch` writes, in a file without a name that is gone when it is closed."""
    file = tempfile.TemporaryFile()
    try:
        fetch(file)
    except BaseException:
        file.close()
        raise
    file.seek(0)
    return file


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()
