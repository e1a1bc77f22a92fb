"""The processes that this one has started, and those that they have started, read from /proc."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

GRACE_S = 5.0  # for a process to end after SIGTERM: the raylet ends its own helpers meanwhile
_POLL_S = 0.1
_KILLED_S = 5.0  # the kernel takes a moment, on a busy machine more of one


@dataclass(frozen=True)
class Process:
    """One process: its id, its parent's id, the start of its program's name, when it began (which tells it from a later
    process of the same id), and whether it has ended already."""

    id: int
    parent: int
    name: str
    began: int
    ended: bool


def descendants() -> list[Process]:
    """All processes below this one, parents before children; none where there is no /proc."""
    children: dict[int, list[Process]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):  # it ended while we looked
            process = _read((folder / "stat").read_text())
            children.setdefault(process.parent, []).append(process)
    found = list(children.get(os.getpid(), ()))
    for process in found:  # grows meanwhile
        found += children.get(process.id, ())
    return found


def end_descendants(but: Collection[int] = ()) -> None:
    """End all processes below this one, except those with the ids `but`: by SIGTERM, then by SIGKILL."""
    known: dict[int, Process] = {}
    asked = False
    deadline = time.monotonic() + GRACE_S
    while True:
        # What a helper has started may lose its parent while we look, so all that were ever seen are remembered.
        known |= {process.id: process for process in descendants() if process.id not in but}
        alive = [process for process in known.values() if _is_alive(process)]
        if not alive or time.monotonic() > deadline:
            break
        if not asked:
            _send(alive, signal.SIGTERM)
            asked = True
        time.sleep(_POLL_S)
    _send(alive, signal.SIGKILL)
    while any(map(_is_alive, alive)) and time.monotonic() < deadline + _KILLED_S:
        time.sleep(_POLL_S / 10)


def _send(processes: Collection[Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(process.id, number)


def _is_alive(process: Process) -> bool:
    try:
        now = _read(Path(f"/proc/{process.id}/stat").read_text())
    except (OSError, ValueError, IndexError):
        return False
    return now.began == process.began and not now.ended


def _read(stat: str) -> Process:
    """A line of /proc/ID/stat: `12 (name) S 1 …`, where the name may hold blanks and brackets."""
    before, _, after = stat.rpartition(")")
    number, _, name = before.partition(" (")
    state, parent, *more = after.split()
    return Process(int(number), int(parent), name, int(more[17]), state in "ZX")
