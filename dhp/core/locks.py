"""Locks a run's directory, on one machine or shared storage."""

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
from uuid import uuid4

from dhp.core.errors import CheckpointError, ConfigError
from dhp.core.files import write_whole
from dhp.core.process import say_nothing

LOCK_FILE = ".running.json"
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
    it takes `BEAT_S` × `WATCHED_BEATS` to see that it is dead."""
    made = _make(folder, key)
    path = folder.resolve() / LOCK_FILE
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


TOKEN_FILE = ".attempt.json"


class TakenOver(CheckpointError):
    """Another run has the directory of checkpoints now."""


@dataclass(frozen=True)
class Token:
    """Who may write. id: of one attempt of one run, unlike any other's."""

    id: str
    host: str
    pid: int


_OWN: dict[Path, Token] = {}  # of this process, by directory


@contextmanager
def fenced(folder: Path) -> Iterator[None]:
    """From here on no other process's run finishes or removes a checkpoint in `folder`, which exists. The
    caller holds the directory's lock. Raises OSError where nothing can be written there."""
    path, token = folder.resolve(), Token(uuid4().hex, socket.gethostname(), os.getpid())
    write_whole(path / TOKEN_FILE, json.dumps(asdict(token)))
    _OWN[path] = token
    try:
        yield
    finally:
        del _OWN[path]
        with suppress(OSError):  # the error to report is the run's own
            if read_token(path) == token:
                (path / TOKEN_FILE).unlink()


def require_fence(folder: Path) -> None:
    """Raise TakenOver where this process has fenced `folder` and another run has done so since, or has done so
    and ended; CheckpointError where it cannot be read."""
    own = _OWN.get(folder.resolve())
    if own is None:
        return
    now = read_token(folder)
    if now == own:
        return
    if now is None and not _is_readable(folder):
        raise CheckpointError(f"training.checkpoint_dir={folder} cannot be read, so nothing is added to it now")
    other = "whose run has ended" if now is None else f"process {now.pid} on host {now.host}"
    raise TakenOver(
        f"training.checkpoint_dir={folder} was taken over by another attempt of this run, or another run "
        f"({other}), while this process was stopped or cut off from it. Nothing was renamed or removed; this process "
        "has nothing left to do"
    )


def _is_readable(folder: Path) -> bool:
    """Whether what is in the folder can be read: of a disk that fails, it cannot."""
    try:
        return TOKEN_FILE not in os.listdir(folder) or bool((folder / TOKEN_FILE).read_bytes())
    except OSError:
        return False


def read_token(folder: Path) -> Token | None:
    """The token there; None: there is none, or no whole one."""
    try:
        found = json.loads((folder / TOKEN_FILE).read_text(encoding="utf-8"))
        return Token(str(found["id"]), str(found["host"]), int(found["pid"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None
