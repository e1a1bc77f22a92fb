"""What must be on a node's disk before an actor there may start; errors name the node's address.

A beacon is a file that the driver puts into a directory that all nodes must share. A rank that does not see it looks
at another disk, and would write its share of a checkpoint where it is not found.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkstemp

import ray

from dhp.base.errors import ConfigError

BEACON_TIMEOUT_S = 10.0  # how long a new file may take to show on another host
EVERYWHERE = "Put it there, at the same path on every node, or on a disk that all of them see"


def require_paths(who: str, needs: Mapping[str, str]) -> None:
    """Raise ConfigError for the first of the paths, by configuration key, that does not exist on this node."""
    for key, path in needs.items():
        if not Path(path).exists():
            raise ConfigError(f"{key}={path} does not exist on {whereabouts(who)}. {EVERYWHERE}")


@contextmanager
def beacon(folder: str) -> Iterator[str]:
    """A file in `folder`, for the time of a run: its path."""
    handle, path = mkstemp(dir=folder, prefix=".running-")
    os.close(handle)
    try:
        yield path
    finally:
        Path(path).unlink(missing_ok=True)


def require_beacon(who: str, path: str | None) -> None:
    """Raise ConfigError when this node does not see the beacon; None: there is none to see."""
    if path is None:
        return
    end = time.monotonic() + BEACON_TIMEOUT_S
    while not Path(path).exists():
        if time.monotonic() > end:
            raise ConfigError(
                f"training.checkpoint_dir={Path(path).parent} on {whereabouts(who)}, is not the directory that "
                "the driver sees. All ranks write their checkpoints there: give one on a disk that all "
                "nodes share, at the same path on each"
            )
        time.sleep(0.2)


def whereabouts(who: str) -> str:
    """This process's node, as an error names it."""
    return f"node {_address()}, where {who} runs"


def _address() -> str:
    return ray.util.get_node_ip_address()
