"""Processes of a run, found by a mark in the environment that they inherit."""

import os
import subprocess
import time
from pathlib import Path

MARK = "DHP_TEST_RUN"


def marked_processes(mark: str, forked: Path | None = None) -> dict[int, str]:
    """Running processes that inherited the mark: command line by process id. Marks have to differ between workers of
    pytest-xdist: the name of tmp_path does not, its whole path does.

    forked: the folder in which the server of tests/helpers/forks names its forks."""
    forks = {int(file.name.rpartition("-")[2]) for file in forked.glob(f"{mark}-*")} if forked else set()
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            if int(folder.name) in forks or f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue  # it ended while we looked
    return {pid: command for pid, command in found.items() if command}


def mark_of(process: subprocess.Popen[str]) -> str:
    """The mark that a started process carries."""
    file = Path(f"/proc/{process.pid}/environ")
    environment = file.read_bytes()
    while not environment and process.poll() is None:
        time.sleep(0.001)  # the kernel closes the files of the old program before it writes the new one's environment
        environment = file.read_bytes()
    return next(e.decode().partition("=")[2] for e in environment.split(b"\0") if e.startswith(MARK.encode()))
