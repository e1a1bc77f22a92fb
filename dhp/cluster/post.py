"""Where an actor's process is looked at from outside: its id, and files that it keeps for others on its node."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

_SAME_S = 1.0  # of a process's start as the kernel's clock has it, read twice


@dataclass(frozen=True)
class Post:
    """A process of an actor. name: of its log (`text-1`). node: Ray's id of its node, on which `pid` and the paths
    mean something. begun: when it started, for ids of processes that ended are given to others.

    stacks: the file to which SIGUSR1 adds the stacks of its threads. heartbeat: of a rank, see
    `dhp.cluster.heartbeat`; "": it keeps none.
    """

    name: str
    node: str
    pid: int
    begun: float
    stacks: str
    heartbeat: str = ""

    def process(self) -> psutil.Process | None:
        """On its node: the process, as long as it is there."""
        try:
            found = psutil.Process(self.pid)
            return found if abs(found.create_time() - self.begun) < _SAME_S else None
        except psutil.Error:
            return None


def own_post(name: str, node: str, stacks: str, heartbeat: str = "") -> Post:
    """Of this process."""
    return Post(name, node, os.getpid(), psutil.Process().create_time(), stacks, heartbeat)


def open_kept(log_dir: str | None, name: str, append: bool = False) -> tuple[int, str]:
    """A file for what a process keeps as long as it lives, and its path for others on the node: beside the logs, or,
    where none can be made there, as on a host that does not see the run's directory, in memory that ends with the
    process."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | (os.O_APPEND if append else os.O_TRUNC)  # not behind a link
    path = None if log_dir is None else Path(log_dir) / name
    if path is not None:
        try:
            return os.open(path, flags, 0o644), str(path)
        except OSError:  # the log says what is wrong with the folder
            pass
    file = os.memfd_create(name)
    return file, f"/proc/{os.getpid()}/fd/{file}"
