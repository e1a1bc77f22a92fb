"""Drivers and Ray workers of tests as forks of one process with the imports done, which are most of a short run.

What a process computes does not depend on whether it imports its modules or finds them imported. Runs whose processes
are looked at, killed or interrupted are started as users start them.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

_START = Path(__file__).parent / "start"
_ROOT = Path(__file__).parents[3]
_LIMIT_S = 120


@functools.cache
def environment() -> dict[str, str]:
    """What the environment of a run or of a Ray must say for its processes to be forks. The first call starts the
    server."""
    folder = tempfile.TemporaryDirectory(prefix="forks")
    address = Path(folder.name) / "server"
    server = subprocess.Popen([sys.executable, "-m", f"{__name__}.server", address], cwd=_ROOT, stdin=subprocess.PIPE)
    atexit.register(lambda: (server.communicate(), folder.cleanup()))
    deadline = time.monotonic() + _LIMIT_S
    while not address.exists():
        if server.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"the fork server did not start within {_LIMIT_S} s (status {server.poll()})")
        time.sleep(0.05)
    path = os.pathsep.join(filter(None, [os.fspath(_START), os.environ.get("PYTHONPATH")]))
    return {"DHP_TEST_FORKS": os.fspath(address), "PYTHONPATH": path}


@contextlib.contextmanager
def of_rays_here() -> Iterator[None]:
    """Workers of Rays that this process starts in here are forks."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment().items():
            patch.setenv(name, value)
        yield
