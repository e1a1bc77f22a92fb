"""An exclusive lock on a directory, held for the time of a run and released when its process ends.

The lock is the kernel's (flock) on a file in the directory, which says who holds it. Some network file systems keep
flock within a host: so the holder touches its file again and again, and a file left by another host is watched before
it is taken over.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from dhp.core.errors import ConfigError
from dhp.core.process import say_nothing

NAME = ".running.json"
BEAT_S = 10.0  # from one touch of the file to the next
WATCHED_BEATS = 3  # how long a file of another host is watched: attributes may be cached for some seconds


@dataclass(frozen=True)
class Holder:
    """The process that holds a directory. since: when it took it, as text."""

    host: str
    pid: int
    since: str


@contextmanager
def locked(folder: Path, key: str, say: Callable[[str], None] = say_nothing) -> Iterator[None]:
    """Hold `folder`: created if missing, removed at the end if it is empty.

    key: the configuration's, for messages. say: receives a line on what is waited for. Raises ConfigError where another
    process holds it, or where it cannot be written. What a dead process has left is no obstacle; of one on another host
    it takes `BEAT_S` × `WATCHED_BEATS` to see that it is dead.
    """
    made = _make(folder, key)
    path = folder.resolve() / NAME
    try:
        handle = _take(path, key, folder, say)
        try:
            ended = threading.Event()
            beat = threading.Thread(target=_beat, args=(handle, ended), daemon=True)
            beat.start()
            yield
        finally:
            ended.set()
            beat.join()
            _remove_own(handle, path)
            os.close(handle)
    finally:
        for one in made:
            try:
                one.rmdir()
            except OSError:  # it is not empty
                break


def _remove_own(handle: int, path: Path) -> None:
    with suppress(OSError):  # the error to report is the run's own
        if os.stat(path).st_ino == os.fstat(handle).st_ino:  # or it is another process's by now
            path.unlink()


def _make(folder: Path, key: str) -> list[Path]:
    """Create `folder`. Returns the folders that were created, parents included, innermost first."""
    missing = [one for one in (folder.absolute(), *folder.absolute().parents) if not one.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{key}={folder} cannot be created ({error.strerror}); choose another") from error
    return missing


def _take(path: Path, key: str, folder: Path, say: Callable[[str], None]) -> int:
    """The open file of the lock, locked and written."""
    while True:
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"{key}={folder} cannot be written ({error.strerror}); choose another") from error
        try:
            if _lock(handle, path, key, folder, say):
                return handle
        except OSError as error:  # a full disk
            _remove_own(handle, path)
            os.close(handle)
            reason = error.strerror or error
            raise ConfigError(
                f"{key}={folder} cannot be written ({reason}). Make room there, or choose another"
            ) from error
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


def _lock(handle: int, path: Path, key: str, folder: Path, say: Callable[[str], None]) -> bool:
    """Lock the file and write its holder into it. False: it was removed meanwhile, and another may be there."""
    own, known = Holder(socket.gethostname(), os.getpid(), time.strftime("%Y-%m-%d %H:%M:%S")), True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise _in_use(_read(handle), key, folder) from None
    except OSError:  # a file system without locks
        known = False
    other = _read(handle)
    if other is not None and (other.host != own.host or not known):
        say(
            f"{key}={folder} was last held by process {other.pid} on host {other.host}: watching for "
            f"{BEAT_S * WATCHED_BEATS:g} s whether that run lives"
        )
        if _is_touched(handle):
            raise _in_use(other, key, folder)
    try:
        if os.stat(path).st_ino != os.fstat(handle).st_ino:
            return False
    except FileNotFoundError:
        return False
    os.ftruncate(handle, 0)
    os.pwrite(handle, json.dumps(asdict(own)).encode(), 0)
    os.fsync(handle)
    return True


def _read(handle: int) -> Holder | None:
    """The holder that the file names; None: it is empty, or no lock's."""
    try:
        found = json.loads(os.pread(handle, 4096, 0))
        return Holder(str(found["host"]), int(found["pid"]), str(found["since"]))
    except (ValueError, KeyError, TypeError):
        return None


def _is_touched(handle: int) -> bool:
    """Whether the file is touched while it is watched. No clock is compared with another host's."""
    before = os.fstat(handle).st_mtime_ns
    for _ in range(WATCHED_BEATS):
        time.sleep(BEAT_S)
        if os.fstat(handle).st_mtime_ns != before:
            return True
    return False


def _beat(handle: int, ended: threading.Event) -> None:
    while not ended.wait(BEAT_S):
        with suppress(OSError):  # its file system is away for a while
            os.utime(handle)


def _in_use(holder: Holder | None, key: str, folder: Path) -> ConfigError:
    who = "another process" if holder is None else f"process {holder.pid} on host {holder.host}"
    since = "" if holder is None else f" since {holder.since}"
    end = "" if holder is None else f" (there: kill {holder.pid})"
    return ConfigError(
        f"{key}={folder} is in use: {who} trains there{since}, and two runs would destroy each other's record and "
        f"checkpoints. Nothing was changed. Wait until it ends, end it{end}, or choose another {key}"
    )
