"""Processes of actors: their output and named errors; processes that this one has started."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from dhp.core.errors import RAISED, DhpError, Fault, RankRaised

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
def named_errors(who: str, what: str) -> Iterator[None]:
    """Turn an unforeseen exception into RankRaised with its traceback; errors meant for a person pass as they are.

    The name is put in here because a failure also reaches callers that depend on the result, under their names.
    """
    try:
        yield
    except DhpError:
        raise
    except Exception as error:
        text = f"{who} failed in {what}: {type(error).__name__}: {error}"
        raise RankRaised(f"{text}\n{traceback.format_exc()}", Fault(RAISED, who, what)) from None
