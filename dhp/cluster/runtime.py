"""Start or join Ray, and leave nothing of ours behind."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from dhp.errors import ConfigError

LOCAL = "local"


@contextmanager
def ray_session(address: str, cpus: int) -> Iterator[None]:
    """Ray for the time of a run: its own on loopback with `cpus` logical CPUs for address=local, else a running one.

    Raises ConfigError when there is no cluster at `address`.
    """
    # Tensors go through shared memory and are read in place; without this each is copied and pickled in-band.
    os.environ["RAY_ENABLE_ZERO_COPY_TORCH_TENSORS"] = "1"
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # keep CUDA visible to actors without a GPU
    common = {"log_to_driver": False, "logging_level": logging.ERROR, "namespace": "dhp"}
    common["runtime_env"] = {"env_vars": {"RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1"}}
    try:
        if address == LOCAL:
            ray.init(
                address=LOCAL, num_cpus=cpus, include_dashboard=False, _node_ip_address="127.0.0.1", **common
            )
        else:
            ray.init(address=address, **common)
    except ConnectionError as error:
        raise ConfigError(
            f"cluster.address={address}: no Ray cluster answers there ({error}). "
            "Start one with `ray start --head`, or leave cluster.address=local"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def cluster_gpus() -> float:
    """GPUs that the cluster has registered."""
    return ray.cluster_resources().get("GPU", 0.0)
