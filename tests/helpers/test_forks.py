"""Forks stand in for processes: their status, their signals and their end are those of the process that waits."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dhp.cluster.forks.fork_client import SERVER
from tests.helpers import forks
from tests.helpers.marks import MARK, mark_of
from tests.helpers.runs import processes_of

LIMIT_S = 100  # beside other tests on a busy machine


def start(folder: Path, code: str) -> subprocess.Popen[str]:
    """A script that runs in a fork."""
    script = folder / "default_worker.py"
    script.write_text(code)
    environment = {**os.environ, **forks.environment(), MARK: folder.name}
    command = [sys.executable, os.fspath(script), "argument"]
    # Tests that a shell runs in the background inherit that interrupts are ignored, and so would what they start.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    finally:
        signal.signal(signal.SIGINT, before)


def fork_of(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    return next(pid for pid in processes_of(process) if pid != process.pid)


def gone(pid: int) -> bool:
    return soon(lambda: not Path(f"/proc/{pid}").exists())


def soon(holds: Callable[[], bool]) -> bool:
    """Whether it holds before long: the server forgets a fork after it has ended."""
    deadline = time.monotonic() + LIMIT_S
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.02)
    return holds()


@pytest.mark.parametrize(("code", "status"), [("", 0), ("raise SystemExit(7)", 7), ("1 / 0", 1)])
def test_its_status_is_the_forks(tmp_path: Path, code: str, status: int) -> None:
    process = start(tmp_path, f"import sys, torch; print(sys.argv[1:], 'tests.helpers.warm' in sys.modules)\n{code}")
    out, error = process.communicate(timeout=LIMIT_S)
    assert (process.returncode, out) == (status, "['argument'] True\n")
    assert ("ZeroDivisionError" in error) == (status == 1)


WAITS = "import time\ntry:\n    print('ready')\n    time.sleep(60)\nexcept KeyboardInterrupt:\n    raise SystemExit(5)"


def test_an_interrupt_reaches_the_fork(tmp_path: Path) -> None:
    process = start(tmp_path, WAITS)
    fork_of(process)
    process.send_signal(signal.SIGINT)
    assert process.wait(LIMIT_S) == 5


@pytest.mark.parametrize("stopped", [False, True])
def test_a_fork_ends_with_the_process_that_waits(tmp_path: Path, stopped: bool) -> None:
    process = start(tmp_path, WAITS)
    assert mark_of(process) == tmp_path.name
    pid = fork_of(process)
    if stopped:
        os.kill(pid, signal.SIGSTOP)
    process.kill()
    process.wait(LIMIT_S)
    assert gone(pid) and soon(lambda: processes_of_mark(tmp_path.name) == [])


def processes_of_mark(mark: str) -> list[Path]:
    folder = forks.folder()
    assert folder is not None
    return list(folder.glob(f"{mark}-*"))


def test_a_fork_and_whoever_waits_may_be_killed_at_once(tmp_path: Path) -> None:
    process = start(tmp_path, WAITS)
    pid = fork_of(process)
    os.kill(pid, signal.SIGKILL)
    process.kill()
    process.wait(LIMIT_S)
    assert gone(pid)
    test_its_status_is_the_forks(tmp_path, "", 0)


def test_a_line_that_ends_early_ends_nothing_else(tmp_path: Path) -> None:
    for sent in (b"", b"\n", b"\n{"):
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(forks.environment()[SERVER])
            line.sendall(sent)
    test_its_status_is_the_forks(tmp_path, "", 0)
