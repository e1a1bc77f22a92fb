"""The processes that this one has started, and those that they have started."""

from __future__ import annotations

import signal
import time
from collections.abc import Collection
from contextlib import suppress

import psutil

GRACE_S = 5.0  # for a process to end after SIGTERM: the raylet ends its own helpers meanwhile
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
            _send(alive, signal.SIGTERM)
            asked = True
        time.sleep(_POLL_S)
    _send(alive, signal.SIGKILL)
    while not all(map(has_ended, alive)) and time.monotonic() < deadline + _KILLED_S:
        time.sleep(_POLL_S / 10)


def _send(processes: Collection[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.send_signal(number)
