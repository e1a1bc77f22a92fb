"""A process that has the imports of a run done, and whose forks are drivers and Ray forks.

`python -m tests.helpers.forks.server ADDRESS` listens on a Unix socket and ends with its standard input. Whoever
connects sends the arguments, environment, folder and standard streams with which Python was started, and is told the
status with which the fork ended. A fork ends with the line to whom it stands for. Ray itself is imported in the
fork: its C++ half reads the environment when it is loaded.
"""

from __future__ import annotations

import array
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import traceback
from typing import Any

import tests.helpers.warm  # noqa: F401


def serve(address: str) -> None:
    """Fork for each connection until standard input ends."""
    assert threading.active_count() == 1, "a fork has only the thread that forked"
    waits = selectors.DefaultSelector()
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    forks: dict[int, socket.socket] = {}
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen(64)
        for file in (0, server, ended):
            waits.register(file, selectors.EVENT_READ)
        while True:
            for key, _ in waits.select():
                if key.fileobj == 0:
                    return _end(forks)
                if key.fileobj is server:
                    line, _ = server.accept()
                    forks[_fork(line, [server.fileno(), ended, wake, waits.fileno()], forks)] = line
                    waits.register(line, selectors.EVENT_READ)
                elif key.fileobj == ended:
                    os.read(ended, 4096)
                    _bury(forks, waits)
                else:  # the place-holder was killed: so is the fork, which `_bury` will see
                    os.kill(next(pid for pid, line in forks.items() if line is key.fileobj), signal.SIGKILL)


def _fork(line: socket.socket, ours: list[int], forks: dict[int, socket.socket]) -> int:
    """The process id of a new fork. `ours` are files of the server alone."""
    _, rights, _, _ = line.recvmsg(1, socket.CMSG_SPACE(3 * array.array("i").itemsize))
    streams = array.array("i", rights[0][2])
    with line.makefile("rb") as file:
        about = json.loads(file.readline())
    pid = os.fork()
    if pid == 0:
        for number in (*ours, line.fileno(), *(other.fileno() for other in forks.values())):
            os.close(number)
        _work(about, streams)
    for number in streams:
        os.close(number)
    return pid


def _work(about: dict[str, Any], streams: array.array[int]) -> None:
    """What Python was started for; never returns."""
    status = 1
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(about["environment"])
        os.chdir(about["folder"])
        _run(about["words"])
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
        sys.argv, sys.path[0] = words[at + 1 :], os.getcwd()
        runpy.run_module(words[at + 1], run_name="__main__", alter_sys=True)
    else:
        sys.argv, sys.path[0] = words[at:], os.path.dirname(words[at])
        runpy.run_path(words[at], run_name="__main__")


def _bury(forks: dict[int, socket.socket], waits: selectors.BaseSelector) -> None:
    """Tell of the forks that have ended."""
    while forks:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        line = forks.pop(pid)
        waits.unregister(line)
        with line:
            try:
                line.sendall(bytes([os.waitstatus_to_exitcode(status) & 255]))
            except OSError:
                pass  # who waited was killed meanwhile


def _end(forks: dict[int, socket.socket]) -> None:
    for pid in forks:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    serve(sys.argv[1])
