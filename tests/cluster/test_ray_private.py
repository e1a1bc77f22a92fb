"""Canaries: Ray's private names are what dhp takes them for, and stand in one file."""

import inspect
import re
from pathlib import Path

import pytest
import ray
from ray._private import ray_constants, services, utils
from ray._private.node import Node

from dhp.cluster import ray_private

ROOT = Path(__file__).parents[2]


def test_they_stand_in_one_file() -> None:
    private = re.compile(r"ray\._[a-z]|ray import _|\._actor_id|global_worker")
    found = [str(file.relative_to(ROOT)) for file in (ROOT / "dhp").rglob("*.py") if private.search(file.read_text())]
    assert found == ["dhp/cluster/ray_private.py"]


@pytest.mark.parametrize(
    ("function", "parameters"),
    [
        (services.get_node, ["gcs_address", "node_id"]),
        (utils.set_sigterm_handler, ["sigterm_handler"]),
        (Node.start_api_server, ["self", "include_dashboard", "raise_on_failure"]),
        (Node.start_monitor, ["self"]),
    ],
)
def test_what_a_start_replaces_takes_what_it_took(function: object, parameters: list[str]) -> None:
    assert list(inspect.signature(function).parameters) == parameters  # type: ignore[arg-type]


def test_ray_init_calls_what_a_start_replaces() -> None:
    """By attribute of the module, or the replacement would be passed by."""
    start = inspect.getsource(ray.init) + inspect.getsource(Node)
    assert "set_sigterm_handler" in inspect.getsource(ray._private.worker) and "services.get_node(" in start
    assert "self.start_api_server(" in start and "self.start_monitor()" in start


def test_constants_are_read_where_ray_starts() -> None:
    assert ray_constants.ENABLE_RAY_CLUSTER in (True, False)
    assert ray_private.CLUSTERS == "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    assert ray_private.AUTH_MODE == "RAY_AUTH_MODE"
    assert ray_constants.RAY_ENABLE_ZERO_COPY_TORCH_TENSORS in (True, False)


def test_a_function_is_replaced_and_put_back() -> None:
    before = services.get_node
    with ray_private.replaced(ray_private.GET_NODE, lambda own: (own, "other")):
        assert services.get_node == (before, "other")
    assert services.get_node is before
    with ray_private.with_clusters(not ray_constants.ENABLE_RAY_CLUSTER):
        pass


def test_an_actors_id_and_the_control_stores_client_have_their_names() -> None:
    assert "_actor_id" in inspect.getsource(ray.actor.ActorHandle) and "gcs_client" in inspect.getsource(
        ray._private.worker
    )
    ray_private.read_environment_anew()
