"""A file next to each rank's log that says how many collectives it began and which was the last: what a hang's message
quotes, since a rank that waits in a collective answers no call."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

PERIOD_S = 1.0


def call_file(log_dir: str | None, stage: str, rank: int) -> str | None:
    """Its path; None: ranks have no logs of their own."""
    return None if log_dir is None else f"{log_dir}/{stage}-{rank}.calls"


def keep_calls(path: str | None, describe: Callable[[], str], period_s: float = PERIOD_S) -> None:
    """Write what `describe` says whenever it has changed, looking every `period_s` seconds for as long as the process
    lives. Nothing is written where the file cannot be made, as on a host that does not see the run's directory."""
    if path is None:
        return
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)  # not what a link leads to
    except OSError:
        return  # the log says so already
    threading.Thread(target=_write_changes, args=(file, describe, period_s), name="calls", daemon=True).start()


def read_calls(path: str | None) -> str:
    """The last text that a rank wrote; empty where there is nothing to read."""
    if path is None:
        return ""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _write_changes(file: int, describe: Callable[[], str], period_s: float) -> None:
    written, stop = "", threading.Event()
    while not stop.wait(period_s):
        now = describe()
        if now != written:
            line = f"{now}\n".encode()
            os.pwrite(file, line, 0)
            os.ftruncate(file, len(line))
            written = now
