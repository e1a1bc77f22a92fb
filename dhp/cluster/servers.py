"""The servers of a Ray of our own as processes: whether they live, and their end with all that they started.

Ray's core notices the death of its control store after a minute, and then aborts the driver without a word. One that a
signal has stopped it does not notice at all.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from dhp.cluster.processes import has_ended, is_named, is_stopped, send
from dhp.core.errors import ClusterError
from dhp.core.process import INTERRUPTED, is_command

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
def own_servers(others: Collection[int], folder: Path) -> Iterator[None]:
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
