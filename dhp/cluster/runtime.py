"""Start or join Ray, and leave nothing of ours behind."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import ray
from ray._private import ray_constants, services

from dhp.errors import ConfigError

LOCAL, AUTO, CLIENT = "local", "auto", "ray://"
PROBE_TIMEOUT_S = 5.0

# Tensors go through shared memory and are read in place; without this each is copied and pickled in-band.
_ENVIRONMENT = {"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}


@contextmanager
def ray_session(address: str, cpus: int, gpus: int | None = None) -> Iterator[None]:
    """Ray for the time of a run: its own on loopback for address=local, else a running one.

    cpus, gpus: logical resources of a Ray of our own; None: the GPUs that Ray finds.

    Raises ConfigError when there is no cluster at `address`.
    """
    os.environ.update(_ENVIRONMENT)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # keep CUDA visible to actors without a GPU
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")  # every failure is reported by us, once
    common: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "dhp"}
    with ExitStack() as stack:
        stack.callback(ray.shutdown)
        with _own_sigterm():
            if address == LOCAL:
                with _on_loopback():  # workers inherit the environment; a runtime_env would only delay them
                    ray.init(address=LOCAL, num_cpus=cpus, num_gpus=gpus, include_dashboard=False, **common)
            else:
                _attach(address, common)
        yield


def cluster_gpus() -> float:
    """GPUs that the cluster has registered."""
    return ray.cluster_resources().get("GPU", 0.0)


def _attach(address: str, common: dict[str, Any]) -> None:
    try:
        _probe(address)
        ray.init(address=address, runtime_env={"env_vars": _ENVIRONMENT}, **common)
    except (ConnectionError, OSError, ValueError) as error:
        raise ConfigError(
            f"cluster.address={address}: no Ray cluster answers there ({error}). "
            "Start one with `ray start --head`, or set cluster.address=local"
        ) from error


def _probe(address: str) -> None:
    """Raise OSError when nothing listens: Ray would try for a minute and then abort the process."""
    found = address.removeprefix(CLIENT)
    if found == address:
        found = services.canonicalize_bootstrap_address(address)
    host, _, port = found.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_TIMEOUT_S).close()
    except OSError as error:
        raise OSError(f"{found}: {error.strerror or error}") from error


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Ray started in here, and its workers, listen on 127.0.0.1 only.

    `ray.init` replaces a loopback node address by the host's own; what it has for desktops, where clusters are
    off and firewalls ask, is the way to keep it.
    """
    name, enabled = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, ray_constants.ENABLE_RAY_CLUSTER
    before = os.environ.get(name)
    os.environ[name], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = enabled
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Keep the SIGTERM handler: that of `ray.init` ends the process before a run can write its summary."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
