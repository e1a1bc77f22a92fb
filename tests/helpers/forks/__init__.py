"""Drivers and Ray workers of tests as forks of one process with the imports done, which are most of a short run."""

import atexit
import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dhp.cluster.forks.fork_client import SERVER
from tests.helpers.forks.start.sitecustomize import MODULES

_ROOT = Path(__file__).parents[3]
START = Path(__file__).parent / "start"  # Python's hook for the processes of runs
_ADDRESS = "server"
_LIMIT_S = 120


_SERVER: list[Path] = []  # its folder, once there is one


def environment() -> dict[str, str]:
    """What the environment of a run or of a Ray must say for its processes to be forks. The first call starts the
    server."""
    if not _SERVER:
        _SERVER.append(_start())
    path = os.pathsep.join(filter(None, [os.fspath(START), os.environ.get("PYTHONPATH")]))
    return {SERVER: os.fspath(_SERVER[0] / _ADDRESS), MODULES: "dhp.train_ray dhp", "PYTHONPATH": path}


def folder() -> Path | None:
    """Where the server keeps a file for each fork; None: there is no server."""
    return _SERVER[0] if _SERVER else None


def _start() -> Path:
    folder = tempfile.TemporaryDirectory(prefix="forks")
    address = Path(folder.name) / _ADDRESS
    server = subprocess.Popen([sys.executable, "-m", f"{__name__}.server", address], cwd=_ROOT, stdin=subprocess.PIPE)
    atexit.register(lambda: (server.communicate(), folder.cleanup()))
    deadline = time.monotonic() + _LIMIT_S
    while not (address.parent / "ready").exists():
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the fork server did not start within {_LIMIT_S} s (status {server.poll()})")
        time.sleep(0.05)
    return Path(folder.name)


@contextlib.contextmanager
def of_rays_here() -> Iterator[None]:
    """Workers of Rays that this process starts in here are forks."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        yield
