"""The driver of a run as a child process, and what it leaves behind."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress

import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # of linux/prctl.h
GRACE_S = 5.0  # for what the driver left to end by itself: Ray's servers take a moment
KILLED_GRACE_S = 1.0  # of a driver that was killed: nothing below it is being ended in order
_POLL_S = 0.1
_QUIET = 3  # looks in a row that find nothing: one may miss a process whose parent ends just then
_KILLED_S = 5.0  # the kernel takes a moment, on a busy machine more of one


def adopt_orphans() -> None:
    """From here on a process below this one whose parent ends becomes this one's child, so that none is out of sight.
    Ray's agents change their titles, and with them what else would tell whose they are."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


class Driver:
    """A started driver, in a session of its own: a terminal's Ctrl-C reaches it once, through its supervisor. It gets
    SIGTERM where the supervisor dies."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]):
        """environment: beside that of this process."""
        supervisor = os.getpid()
        self._others = {child.pid for child in psutil.Process().children(recursive=True)}
        self._known: set[psutil.Process] = set()
        self._process = subprocess.Popen(
            list(command),
            env={**os.environ, **environment},
            start_new_session=True,
            preexec_fn=lambda: _die_with(supervisor),
        )

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def look(self) -> None:
        """Remember what it has started: a process whose parent ends while they are listed is in no list."""
        self._below()

    def poll(self) -> int | None:
        """Its exit status, minus the number of a signal that ended it; None: it runs."""
        return self._process.poll()

    def send(self, number: int) -> None:
        """Send it a signal."""
        if self._process.poll() is None:
            self._process.send_signal(number)

    def kill(self) -> int:
        """End it and everything below it at once, also what is stopped; its exit status."""
        _send(self._below(), signal.SIGKILL)
        self._process.kill()
        return self._process.wait()

    def end_others(self, grace_s: float = GRACE_S) -> list[str]:
        """Once it has ended, end what it left: names of the processes that did not end by themselves in `grace_s`."""
        deadline = time.monotonic() + grace_s
        quiet = 0
        while quiet < _QUIET and time.monotonic() < deadline:
            quiet = 0 if self._below() else quiet + 1
            time.sleep(_POLL_S)
        left = self._below()
        names = [_name(process) for process in left]
        deadline = time.monotonic() + _KILLED_S
        while left and time.monotonic() < deadline:
            _send(left, signal.SIGKILL)
            time.sleep(_POLL_S)
            left = self._below()
        return names

    def _below(self) -> list[psutil.Process]:
        """Living processes that the driver started, or that lost their parent since; not the driver itself."""
        apart = {*self._others, self._process.pid}
        found = {process for process in psutil.Process().children(recursive=True) if process.pid not in apart}
        ended = {process for process in found | self._known if _has_ended(process)}
        for process in ended & found:
            with suppress(OSError):  # not adopted yet
                os.waitpid(process.pid, os.WNOHANG)
        self._known = (self._known | found) - ended
        return list(self._known)


def _die_with(supervisor: int) -> None:
    """In the child before its program: SIGTERM when the supervisor dies, and now if it has already."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != supervisor:
        os._exit(1)


def _has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def _name(process: psutil.Process) -> str:
    try:
        return (process.cmdline() or [process.name()])[0].split(" ")[0]
    except psutil.Error:
        return f"process {process.pid}"


def _send(processes: Collection[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            process.send_signal(number)
