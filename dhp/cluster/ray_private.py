"""Private names of Ray; tests/cluster/test_ray_private.py has their canaries."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ray._common.utils import get_default_system_temp_dir as default_folder
from ray._private import ray_constants, services, utils
from ray._private.authentication.authentication_token_setup import AUTH_MODE_ENV_VAR as AUTH_MODE
from ray._private.client_mode_hook import client_mode_wrap
from ray._private.node import Node
from ray._private.state import available_resources_per_node
from ray._private.worker import global_worker
from ray._raylet import AuthenticationTokenLoader, Config

__all__ = [
    "AUTH_MODE",
    "CLUSTERS",
    "GET_NODE",
    "HELPERS",
    "SIGTERM_HANDLER",
    "actor_id",
    "available_resources_per_node",
    "bootstrap_address",
    "client_mode_wrap",
    "default_folder",
    "key_exists",
    "read_environment_anew",
    "replaced",
    "with_clusters",
    "without_copies",
]

CLUSTERS = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR  # "0": what listens does so on loopback alone

# Functions that a start of our own replaces: (where, name).
GET_NODE = (services, "get_node")
SIGTERM_HANDLER = (utils, "set_sigterm_handler")
HELPERS = ((Node, "start_api_server"), (Node, "start_monitor"))


def actor_id(actor: Any) -> str:
    """Of the handle of an actor, in hex."""
    return str(actor._actor_id.hex())


@contextmanager
def replaced(place: tuple[Any, str], make: Callable[[Any], Any]) -> Iterator[None]:
    """A function of Ray's with what `make` makes of it in its place, in here."""
    owner, name = place
    before = getattr(owner, name)
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def with_clusters(enabled: bool) -> Iterator[None]:
    """Ray started in here may listen beyond loopback, or not: what it has for desktops, where firewalls ask."""
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = enabled
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before


def bootstrap_address(address: str) -> str:
    """The control store's `host:port` of a user's address. Raises ConnectionError where there is none."""
    return str(services.canonicalize_bootstrap_address(address))


def without_copies() -> None:
    """Tensors are read in place: this process read its environment when it imported Ray."""
    ray_constants.RAY_ENABLE_ZERO_COPY_TORCH_TENSORS = True


def read_environment_anew() -> None:
    """Ray reads how it authenticates once a process; here one process may start several Rays, or join one."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


def key_exists(key: bytes, timeout_s: float) -> None:
    """Ask the control store for a key. Raises what its client raises where no answer comes."""
    global_worker.gcs_client.internal_kv_exists(key, None, timeout=timeout_s)
