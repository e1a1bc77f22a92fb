"""Isolates a Ray of our own from other users: a token, a folder and addresses of its own."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from ray._common.utils import get_default_system_temp_dir
from ray._private import ray_constants
from ray._private.authentication.authentication_token_setup import AUTH_MODE_ENV_VAR
from ray._raylet import AuthenticationTokenLoader, Config

from dhp.core.errors import CheckpointError, ConfigError, DataError
from dhp.core.own_folder import base_for_socket

TOKEN = "RAY_AUTH_TOKEN"
NO_REPORTS = {"RAY_USAGE_STATS_ENABLED": "0"}  # whatever the user's own clusters send to Ray's makers
LOOPBACK = ("127.0.0.1", "localhost")
# As much as Ray adds to a folder for the paths of its sockets.
_SOCKET = "/dhp-ray-12345678/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
_EXPECTED = (ConfigError, DataError, CheckpointError, KeyboardInterrupt, SystemExit)  # not in Ray's logs
_REMOVAL_S = 2.0  # its last helpers end a moment after it, and write until then


@contextmanager
def own_ray() -> Iterator[Path]:
    """The environment of a Ray of our own, for as long as it runs, and an empty folder for its sockets and logs that
    this user alone may enter. The folder is removed at the end; after a failure that Ray's logs may explain it stays.

    Raises OSError where no folder can be made.
    """
    folder = Path(tempfile.mkdtemp(prefix="dhp-ray-", dir=_base()))  # 0700; Ray opens what it makes below to everybody
    try:
        with own_token(), changed_environment({**NO_REPORTS, **_without_proxy()}):
            yield folder / "ray"
    except _EXPECTED:
        _remove(folder)
        raise
    except BaseException:
        if any(folder.iterdir()):
            print(f"the logs of Ray's own processes stay in {folder}", file=sys.stderr, flush=True)
        else:
            _remove(folder)
        raise
    _remove(folder)


@contextmanager
def own_token() -> Iterator[None]:
    """Ray started in here asks for a token that is in the environment of its processes alone. The file that Ray would
    make in the home directory can be read by others wherever they may enter it, and the agent that runs commands for
    those who have the token listens without a dashboard too."""
    try:
        with changed_environment({AUTH_MODE_ENV_VAR: "token", TOKEN: secrets.token_hex(32)}):
            _read_anew()
            yield
    finally:
        _read_anew()


@contextmanager
def on_loopback() -> Iterator[None]:
    """Ray started in here, and its workers, listen on 127.0.0.1 only.

    `ray.init` replaces a loopback node address by the host's own; what it has for desktops, where clusters are
    off and firewalls ask, is the way to keep it.
    """
    enabled = ray_constants.ENABLE_RAY_CLUSTER
    with changed_environment({ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}):
        ray_constants.ENABLE_RAY_CLUSTER = False
        try:
            yield
        finally:
            ray_constants.ENABLE_RAY_CLUSTER = enabled


@contextmanager
def changed_environment(values: Mapping[str, str]) -> Iterator[None]:
    """Environment variables with these values in here, and as they were after it."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _read_anew() -> None:
    """Ray reads both variables once a process; here one process may start several Rays, or join one."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def _without_proxy() -> dict[str, str]:
    """Both spellings of the addresses that no proxy is asked for, with loopback among them: Ray's processes would ask
    it for their own neighbours."""
    known = [name for key in ("no_proxy", "NO_PROXY") for name in os.environ.get(key, "").split(",") if name.strip()]
    names = ",".join(dict.fromkeys([*known, *LOOPBACK]))
    return {"no_proxy": names, "NO_PROXY": names}


def _base() -> str:
    """Where Ray itself would put its folder, or /tmp where the paths of sockets below it would be too long."""
    return base_for_socket(get_default_system_temp_dir(), _SOCKET)


def _remove(folder: Path) -> None:
    deadline = time.monotonic() + _REMOVAL_S
    while folder.exists():
        shutil.rmtree(folder, ignore_errors=True)
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)
