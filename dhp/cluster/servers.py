"""Watches and ends processes of actors and of Ray's servers."""

import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import torch

from dhp.core.errors import RAISED, ClusterError, DhpError, Fault, RankRaised
from dhp.core.process import INTERRUPTED, is_command

GRACE_S = 5.0  # for a process to end after SIGTERM: the raylet ends its own helpers meanwhile
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)  # states T and t: by a signal, by a debugger
_POLL_S = 0.1
_KILLED_S = 5.0  # the kernel takes a moment, on a busy machine more of one


def descendants() -> list[psutil.Process]:
    """All processes below this one."""
    return psutil.Process().children(recursive=True)


def has_ended(process: psutil.Process) -> bool:
    """Whether it is gone, or a zombie that its parent has not asked for yet."""
    try:
        return not process.is_running() or process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return True


def is_named(process: psutil.Process, name: str) -> bool:
    """Whether its program has that name; a process that is gone has none."""
    with suppress(psutil.NoSuchProcess):
        return process.name() == name
    return False


def is_stopped(process: psutil.Process) -> bool:
    """Whether a signal or a debugger has stopped it; a process that is gone is not."""
    with suppress(psutil.Error):
        return process.status() in STOPPED
    return False


def end_descendants(but: Collection[int] = ()) -> None:
    """End all processes below this one, except those with the ids `but`: by SIGTERM, then by SIGKILL."""
    known: set[psutil.Process] = set()
    asked = False
    deadline = time.monotonic() + GRACE_S
    while True:
        # What a helper has started may lose its parent while we look, so all that were ever seen are remembered.
        known |= {process for process in descendants() if process.pid not in but}
        alive = [process for process in known if not has_ended(process)]
        if not alive or time.monotonic() > deadline:
            break
        if not asked:
            send(alive, signal.SIGTERM)
            asked = True
        time.sleep(_POLL_S)
    send(alive, signal.SIGKILL)
    while not all(map(has_ended, alive)) and time.monotonic() < deadline + _KILLED_S:
        time.sleep(_POLL_S / 10)


def send(processes: Collection[psutil.Process], number: signal.Signals) -> None:
    """Send a signal to all of them that are still there."""
    for process in processes:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.send_signal(number)


# Warnings of libraries, by text: why each is harmless here.
_UNDERSTOOD = (
    "Zero-copy tensor serialization is enabled",  # what is sent is detached and contiguous, and is not written to
    "The input tensor is non-contiguous",  # which takes a copy, of a row's tokens
    "The given NumPy array is not writable",  # the same, at the receiver
)


def silence_understood_warnings() -> None:
    """Leave out of this process's log the warnings of libraries that are known to mean nothing here."""
    for text in _UNDERSTOOD:
        warnings.filterwarnings("ignore", message=text)


def redirect_output(log_dir: str | None, name: str) -> None:
    """Redirect this process's output to `log_dir`/`name`.log, so that a run's terminal shows the run.

    On a host without the run directory, or where it cannot be written, it stays in Ray's own log, which then says so.
    """
    silence_understood_warnings()
    if log_dir is None:
        return
    try:
        # The run directory itself is not made: one of that name on another disk would hide where the logs are.
        Path(log_dir).mkdir(exist_ok=True)
        if Path(log_dir).is_symlink():
            raise OSError("it is a link")
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW  # not to what a link leads to
        log = os.open(Path(log_dir) / f"{name}.log", flags, 0o644)
    except OSError as error:
        print(f"{name}: the log stays here, because {log_dir} cannot be written on this host: {error}", flush=True)
        return
    for stream in (sys.stdout, sys.stderr):
        os.dup2(log, stream.fileno())
    os.close(log)


@contextmanager
def named_errors(who: str, what: str, tell_memory: Callable[[], str] | None = None) -> Iterator[None]:
    """Turn an unforeseen exception into RankRaised with its traceback; errors meant for a person pass as they are.

    tell_memory: who holds the GPU, behind an error that says that its memory is short.

    The name is put in here because a failure also reaches callers that depend on the result, under their names."""
    try:
        yield
    except DhpError:
        raise
    except Exception as error:
        text = f"{who} failed in {what}: {type(error).__name__}: {error}"
        short = isinstance(error, torch.OutOfMemoryError)
        said = f"\n{tell_memory()}" if short and tell_memory is not None else ""
        raise RankRaised(f"{text}{said}\n{traceback.format_exc()}", Fault(RAISED, who, what, short=short)) from None


NAMES = {"gcs_server": "its control store", "raylet": "its server of this node"}
CHECK_S = 1.0
STOPPED_S = 30.0  # a server may be stopped for so long
LEFT_S = 2.0  # for Ray's agents to end after Ray
TEARDOWN_S = 20.0  # then what hangs in it is ended by force
FORCED_S = 8.0  # after that the process ends itself
BROKEN_S = 2.0  # instead of both where a server has ended: nobody will answer


class _Own:
    """Of this process: one Ray at a time."""

    servers: Mapping[str, psutil.Process] = {}  # by program
    family: frozenset[psutil.Process] = frozenset()
    folder = Path()  # of their logs
    checked = 0.0
    stopped: Mapping[str, float] = {}  # since when, by program


@contextmanager
def watch_servers(others: Collection[int], folder: Path) -> Iterator[None]:
    """A Ray of our own has just started, and ends in here. What it started and what does not end with it is ended
    afterwards. others: ids of processes that were there before it. folder: of its logs."""
    before = (_Own.servers, _Own.family, _Own.folder)  # of another Ray, which is none of this one's
    children = [child for child in psutil.Process().children() if child.pid not in others]
    _Own.servers = {name: child for child in children for name in NAMES if is_named(child, name)}
    _Own.family, _Own.folder, _Own.stopped = frozenset(), folder, {}
    _remember()
    try:
        yield
    finally:
        deadline = time.monotonic() + LEFT_S
        while not all(map(has_ended, _Own.family)) and time.monotonic() < deadline:
            time.sleep(0.05)
        _kill()
        _Own.servers, _Own.family, _Own.folder = before


def require_servers(at_once: bool = False, stopped_s: float | None = None) -> None:
    """Raise ClusterError where a server of our own Ray has ended, or is stopped for `stopped_s`; None: `STOPPED_S`.
    Looks once a `CHECK_S`, or at once."""
    now = time.monotonic()
    if not _Own.servers or not at_once and now - _Own.checked < CHECK_S:
        return
    _Own.checked = now
    ended = [f"{name} ({NAMES[name]}, process {one.pid})" for name, one in _Own.servers.items() if has_ended(one)]
    if ended:
        raise ClusterError(
            f"Ray's {' and '.join(ended)} ended, and the run with it. Frequent causes: the machine ran out of memory "
            "and killed it (see `dmesg`), or somebody did. Where it ended by itself, its own log says more"
        )
    _Own.stopped = {name: _Own.stopped.get(name, now) for name, one in _Own.servers.items() if is_stopped(one)}
    limit_s = STOPPED_S if stopped_s is None else stopped_s
    late = [name for name, since in _Own.stopped.items() if now - since >= limit_s]
    if late:
        raise ClusterError(_stopped(late, now - min(_Own.stopped[name] for name in late)))


def _stopped(names: Sequence[str], seconds: float) -> str:
    shown = " and ".join(f"{name} ({NAMES[name]}, process {_Own.servers[name].pid})" for name in names)
    pids = " ".join(str(_Own.servers[name].pid) for name in names)
    return (
        f"Ray's {shown} has been stopped for {max(1.0, seconds):.0f} s (SIGSTOP or a debugger), and the run ends: "
        f"without it no actor can be started or ended, and no death of one is known. `kill -CONT {pids}` in time lets "
        "it go on; training.resume=auto continues from the newest checkpoint"
    )


@contextmanager
def limited_teardown(error: BaseException | None) -> Iterator[None]:
    """A teardown that ends. What hangs in it is ended by force: first our own Ray, then, if it is a command of ours,
    this process, whose exit status and message are those of `error`, the reason for the teardown; None: the run has
    completed."""
    _remember()
    ended = threading.Event()
    broken = any(has_ended(server) or is_stopped(server) for server in _Own.servers.values())
    if broken:
        _kill()
    limits = (0.0, BROKEN_S) if broken else (TEARDOWN_S, FORCED_S)
    watch = threading.Thread(target=_end_by_force, args=(error, ended, *limits), name="teardown", daemon=True)
    watch.start()
    try:
        yield
    finally:
        ended.set()
        watch.join()


def _end_by_force(error: BaseException | None, ended: threading.Event, after_s: float, forced_s: float) -> None:
    if ended.wait(after_s):
        return
    if after_s and _Own.servers:
        _write(f"Ray has not ended in {after_s:g} s: killing its processes")
    _kill()
    if ended.wait(forced_s) or not is_command():
        return
    if _Own.servers:
        _write(f"the logs of Ray's own processes stay in {_Own.folder}")
    _write(f"Ray's shutdown hangs: this process ends without it{_reason(error)}")
    os._exit(0 if error is None else INTERRUPTED if isinstance(error, KeyboardInterrupt) else 1)


def _reason(error: BaseException | None) -> str:
    if error is None or isinstance(error, KeyboardInterrupt):
        return ""
    return f"\n{type(error).__name__}: {error}"


def _write(text: str) -> None:
    with suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def _remember() -> None:
    """All that the servers have started so far: agents change their titles and, once Ray has ended, their parents."""
    found = set(_Own.family) | set(_Own.servers.values())
    for server in _Own.servers.values():
        with suppress(psutil.Error):
            found.update(server.children(recursive=True))
    _Own.family = frozenset(found)


def _kill() -> None:
    send([process for process in _Own.family if not has_ended(process)], signal.SIGKILL)
