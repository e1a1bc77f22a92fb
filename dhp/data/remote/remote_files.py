"""Remote files as paths, with bounded local copies."""

import errno
import fcntl
import hashlib
import io
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO
from urllib.parse import quote

import numpy as np

from dhp.core.errors import DataError
from dhp.core.files import scheme_of
from dhp.core.process import say_line
from dhp.data.remote.transfer import LocalError, RemoteSettings, open_filesystem, retried

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


# What file systems say of a file's state, the most telling first.
_TAGS = (
    "ETag",
    "etag",
    "md5Hash",
    "checksum",
    "blob_id",
    "mtime",
    "LastModified",
    "last_modified",
    "updated",
    "created",
)
_PIECE = 1 << 20
_AT_ONCE = 16  # requests
_KNOWN = 1 << 14  # files whose size and state a process remembers


@dataclass(frozen=True)
class RemoteInfo:
    """Bytes of a file, if known, and a text that changes with it; "" where its file system has none."""

    size: int | None
    tag: str


@dataclass(frozen=True)
class RemoteFile:
    """A file behind an address. What it is when it is first looked at, it must stay while a process reads it."""

    url: str
    settings: RemoteSettings

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        """The last piece of the address."""
        return self.url.rpartition("/")[2]

    @property
    def suffix(self) -> str:
        """The name's ending, with its dot."""
        return PurePosixPath(self.name).suffix

    def about(self) -> RemoteInfo:
        """Its size and state; asked for once in a process. Raises DataError."""
        return _about(self)

    @property
    def size(self) -> int:
        """Its bytes. Raises DataError."""
        known = self.about().size
        if known is not None:
            return known
        with self.open() as file:
            return os.fstat(file.fileno()).st_size

    def open(self, mode: str = "rb") -> BinaryIO:
        """Its bytes, seekable: the copy in the cache. Raises DataError where it cannot be fetched."""
        assert mode == "rb"
        about = self.about()
        fetch = lambda target: _fetch(self, about, target)
        cache = _cache(self.settings)
        if cache is None:
            return without_cache(fetch)
        return cache.open(self._key(about), about.size, fetch, self.settings.seconds)

    def open_text(self) -> io.TextIOWrapper:
        """Its text, in UTF-8, line ends as they are."""
        return io.TextIOWrapper(self.open(), encoding="utf-8-sig", newline="")

    def read_bytes(self) -> bytes:
        """All of it."""
        with self.open() as file:
            return file.read()

    def index(self, kind: str, make: Callable[[], np.ndarray]) -> np.ndarray:
        """An array about its contents, int64 [n], kept with the copies, so that it is made once."""
        cache = _cache(self.settings)
        return make() if cache is None else cache.index(f"{kind}\0{self._key(self.about())}", make)

    def _key(self, about: RemoteInfo) -> str:
        return f"{self.url}\0{about.size}\0{about.tag}"


@dataclass(frozen=True)
class RemoteFolder:
    """A folder behind an address, from which names of annotations start and which none may leave."""

    url: str
    settings: RemoteSettings

    def __str__(self) -> str:
        return self.url

    def find(self, name: str, what: str) -> RemoteFile:
        """The file of that name below the folder; or of that address, if it is below. what: its kind, for errors.
        Raises DataError, with the reason alone, for a name that leads elsewhere."""
        base = self.url.rstrip("/")
        web = scheme_of(base) in ("http", "https")
        inside = name.removeprefix(f"{base}/") if scheme_of(name) else name
        if scheme_of(inside):
            raise DataError(f"{what} {name:.200} is not below data_path {base}; refused")
        parts = inside.split("/")
        if inside.startswith("/") or ".." in parts or "\\" in inside or "\0" in inside or "::" in inside:
            raise DataError(f"{what} path {name!r:.200} leaves data_path {base}, or may; refused")
        kept = [part for part in parts if part not in ("", ".")]
        if not kept:
            raise DataError(f"{what} path {name!r:.200} names no file")
        return RemoteFile(f"{base}/{quote('/'.join(kept)) if web else '/'.join(kept)}", self.settings)


Source = Path | RemoteFile


def size_of(source: Source) -> int:
    """Bytes of a file. Raises OSError or DataError."""
    return source.size if isinstance(source, RemoteFile) else source.stat().st_size


def look_up(sources: Sequence[Source]) -> None:
    """Ask for sizes and states of many files at once, which one by one would take a while. Raises DataError."""
    far = [source for source in sources if isinstance(source, RemoteFile)]
    if far:
        with ThreadPoolExecutor(_AT_ONCE) as threads:
            list(threads.map(RemoteFile.about, far))


def list_folder(url: str, settings: RemoteSettings) -> tuple[RemoteFile, ...]:
    """All files below a folder behind an address, by name. Raises DataError."""

    def find() -> list[str]:
        filesystem, path = open_filesystem(url)
        return [filesystem.unstrip_protocol(found) for found in filesystem.find(path)]

    return tuple(RemoteFile(found, settings) for found in sorted(retried(url, find, settings)))


def is_folder(url: str, settings: RemoteSettings) -> bool:
    """Whether an address is a folder's. Raises DataError where nothing is there."""

    def look() -> bool:
        filesystem, path = open_filesystem(url)
        return bool(filesystem.info(path)["type"] == "directory")

    return retried(url, look, settings)


@lru_cache(maxsize=_KNOWN)
def _about(file: RemoteFile) -> RemoteInfo:
    return retried(file.url, lambda: _look(file.url), file.settings)


def _look(url: str) -> RemoteInfo:
    filesystem, path = open_filesystem(url)
    info: dict[str, Any] = filesystem.info(path)
    if info.get("type") == "directory":
        raise IsADirectoryError("it is a folder")
    tag = next((f"{name}={info[name]}" for name in _TAGS if info.get(name) is not None), "")
    return RemoteInfo(None if info.get("size") is None else int(info["size"]), tag)


def _fetch(file: RemoteFile, about: RemoteInfo, target: BinaryIO) -> None:
    """Write the file's bytes. Raises DataError where fewer or more come than it has, try after try, or where it is not
    the file any more that it was; OSError of the disk."""

    def copy() -> None:
        filesystem, path = open_filesystem(file.url)
        count = _written(target, b"", anew=True)
        with filesystem.open(path, "rb", cache_type="none") as source:
            while piece := source.read(_PIECE):
                count += _written(target, piece)
        if about.size is not None and count != about.size:
            now = _look(file.url)
            if now != about:
                raise DataError(f"{file.url} has changed since it was opened: {about} became {now}. Start the run anew")
            raise OSError(f"{count} of {about.size} bytes came")

    try:
        retried(file.url, copy, file.settings)
    except LocalError as error:
        raise error.error from None


def _written(target: BinaryIO, piece: bytes, anew: bool = False) -> int:
    """Bytes that were written. anew: from the beginning. Raises LocalError."""
    try:
        if anew:
            target.seek(0)
            target.truncate()
        target.write(piece)
        target.flush()
        return len(piece)
    except OSError as error:
        raise LocalError(error) from error


@lru_cache(maxsize=4)
def _cache(settings: RemoteSettings) -> FileCache | None:
    return None if settings.folder is None else FileCache(Path(settings.folder) / "remote", settings.limit_bytes)
