"""Forks Ray's workers from a process with warm imports.

`python -m dhp.cluster.forks.server ADDRESS MODULE…` listens on a Unix socket, imports the modules, and ends with its
standard input; of `MODULE:FUNCTION` it calls the function too. A client (`fork_client.py`) sends how Python was
started and its standard streams, and receives the status with which the fork ended. Each byte that it sends later is a
signal to the fork, and the end of the connection is SIGKILL. Where a fork could not use the GPUs any more, since an
import has asked their driver, clients are refused and start Python as usual. Ray itself is imported in the fork, as
its C++ half reads the environment when it is loaded."""

from __future__ import annotations

import array
import ctypes
import gc
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from dhp.cluster.forks.fork_client import HANDED_ON, REFUSED

_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_LIMIT_S = 10  # a stopped process must not hold up all others


class Server:
    """Forks, each with the connection to its client."""

    forks = True  # false: clients are refused

    def __init__(self, address: Path) -> None:
        """Clients can connect from here on; they wait until `serve`."""
        self._lines: dict[int, socket.socket] = {}
        self._ended, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(self._wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(os.fspath(address))
        self._server.listen(64)
        self._waits = selectors.DefaultSelector()
        for file in (0, self._server, self._ended):
            self._waits.register(file, selectors.EVENT_READ)

    def serve(self) -> None:
        """Fork for each connection until standard input ends."""
        assert threading.active_count() == 1, "a fork has only the thread that forked"
        while True:
            for key, _ in self._waits.select():
                if key.fileobj == 0:
                    return  # forks end with their parent
                if key.fileobj is self._server:
                    self._fork(self._server.accept()[0])
                elif key.fileobj == self._ended:
                    os.read(self._ended, 4096)
                    self._bury()
                else:
                    self._hand_on(key.fileobj)

    def _fork(self, line: socket.socket) -> None:
        try:
            start, streams = _receive(line)
        except (OSError, ValueError):
            return line.close()  # the client was killed on the way
        if not self.forks:
            for number in streams:
                os.close(number)
            with line, suppress(OSError):
                line.sendall(REFUSED)
            return
        parent, pid = os.getpid(), os.fork()
        if pid == 0:
            _end_with(parent)
            os.setpgid(0, 0)  # Ray kills the group of a worker that ended, which must not be that of all forks
            line.close()
            self._close()
            _work(start, streams)
        for number in streams:
            os.close(number)
        self._lines[pid] = line
        self._waits.register(line, selectors.EVENT_READ)
        self.begun(pid, start["environment"])

    def begun(self, pid: int, environment: dict[str, str]) -> None:
        """A fork has begun."""

    def ended(self, pid: int) -> None:
        """A fork has ended."""

    def _close(self) -> None:
        """Give up what is the server's, in a fork."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._waits.close()
        for file in (self._server, *self._lines.values()):
            file.close()
        os.close(self._ended)
        os.close(self._wake)

    def _bury(self) -> None:
        """Send each ended fork's status to its client."""
        while self._lines:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            self.ended(pid)
            with self._lines.pop(pid) as line:
                self._waits.unregister(line)
                try:
                    line.sendall(bytes([os.waitstatus_to_exitcode(status) & 255]))
                except OSError:
                    pass  # the client was killed

    def _hand_on(self, line: Any) -> None:
        """Signals from the client; a fork that was killed is buried when it has ended."""
        pid = next((pid for pid, other in self._lines.items() if other is line), None)
        if pid is None:
            return  # it was buried a moment ago
        try:
            numbers = line.recv(64)
        except ConnectionResetError:
            numbers = b""
        for number in numbers or [signal.SIGKILL]:
            os.kill(pid, number)


def _end_with(parent: int) -> None:
    """The kernel kills this process when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before
        os._exit(1)


def _receive(line: socket.socket) -> tuple[dict[str, Any], array.array[int]]:
    """How Python was started, and its standard streams. Raises OSError or ValueError when the line ends before."""
    line.settimeout(_LIMIT_S)
    streams = array.array("i")
    _, rights, _, _ = line.recvmsg(1, socket.CMSG_SPACE(3 * streams.itemsize))
    for _, _, numbers in rights:
        streams.frombytes(numbers)
    try:
        with line.makefile("rb", buffering=0) as file:  # signals may be behind it already
            start = json.loads(file.readline())
    except (OSError, ValueError):
        for number in streams:
            os.close(number)
        raise
    line.settimeout(None)
    return start, streams


def _work(start: dict[str, Any], streams: array.array[int]) -> None:
    """What Python was started for; never returns."""
    status = 1
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        # The server's own know what its files were: those of a log can be sought in, those of a pipe cannot.
        sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", buffering=1, closefd=False)
        sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        for number in HANDED_ON:
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, signal.SIG_IGN if number in start["ignored"] else usual)
        os.environ.clear()
        os.environ.update(start["environment"])
        os.chdir(start["folder"])
        _run(start["words"])
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _run(words: list[str]) -> None:
    """Python's own `-m MODULE ARGUMENTS` or `FILE ARGUMENTS`. words: the whole command line."""
    sys.orig_argv = words
    at = next(i for i, word in enumerate(words) if i and (word == "-m" or not word.startswith("-")))
    if words[at] == "-m":
        sys.argv, sys.path[:] = words[at + 1 :], _path(os.getcwd())
        runpy.run_module(words[at + 1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[:] = words[at:], _path(os.path.dirname(words[at]))
        runpy.run_path(words[at], run_name="__main__")


def _path(first: str) -> list[str]:
    """Where Python would look: `first`, then the fork's own PYTHONPATH, which need not be the server's. A process that
    the fork starts afresh looks there too."""
    named = [os.path.abspath(folder) for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
    own = [folder for folder in dict.fromkeys(named)]
    return [first, *own, *(folder for folder in sys.path[1:] if folder not in own)]


def load(modules: Sequence[str]) -> None:
    """Import what forks are to find imported; no tensor is computed, because a fork would lack the threads for it."""
    for module in modules:
        name, _, function = module.partition(":")
        with suppress(Exception):  # a worker that needs it meets the same error, and says who it is
            found = import_module(name)
            if function:
                getattr(found, function)()
    gc.collect()
    gc.freeze()  # a fork's own collections pass over all of this


if __name__ == "__main__":
    _server = Server(Path(sys.argv[1]))
    load(sys.argv[2:])
    from dhp.core.torch_private import forks_may_use_gpus  # torch only now: clients that find no address do not wait

    _server.forks = forks_may_use_gpus()
    _server.serve()
    shutil.rmtree(Path(sys.argv[1]).parent, ignore_errors=True)  # the process that made it was killed
