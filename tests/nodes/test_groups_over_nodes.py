"""Actor groups over two nodes: who lies where, how they reach one another, what is said when something is missing."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dhp.cluster.cluster import ActorGroup
from dhp.cluster.data_actor import DatasetActor
from dhp.cluster.hangs.watch import wait_all
from dhp.cluster.placement.nodes import read_nodes, reader_nodes, this_node
from dhp.cluster.placement.reservation import Topology, bundle_nodes, find_topology, map_ranks, plan_placement, reserve
from dhp.cluster.worker import GroupSettings
from dhp.core.errors import ConfigError
from tests.nodes.conftest import ADDRESSES

WAIT_S = 600.0
TWO_PAIRS, ONE_RANK = {"data": 2, "tensor": 2}, {"data": 1, "tensor": 1}


pytestmark = pytest.mark.slow  # two nodes take half a minute to start; tests/cluster/placement has made ones


@pytest.fixture(scope="module", autouse=True)
def attached(two_nodes: str) -> Iterator[None]:
    from dhp.cluster.ray_session import ray_session

    with ray_session(two_nodes, cpus=0):
        yield


class Trainer:
    """Says where it is and whom it reaches."""

    def about(self) -> dict[str, Any]:
        import os

        import ray
        import torch
        import torch.distributed as dist

        reached = torch.zeros(dist.get_world_size())
        reached[dist.get_rank()] = 1.0
        dist.all_reduce(reached)
        return {
            "address": ray.util.get_node_ip_address(),
            "gpu": ray.get_gpu_ids(),
            "reached": int(reached.sum()),
            "interface": os.environ["GLOO_SOCKET_IFNAME"],
        }


def settings(size: int, **more: Any) -> GroupSettings:
    return GroupSettings("text", size, "gloo", 1, 60.0, None, False, **more)


@pytest.fixture
def reserved() -> Iterator[Any]:
    """Reserve bundles of one GPU each; all are given back."""
    from ray.util.placement_group import remove_placement_group

    made = []

    def take(count: int, degrees: dict[str, int]) -> tuple[Any, tuple[Any, ...], Topology]:
        plan = plan_placement({"text": range(count)}, gpus=4)
        group = reserve(plan, WAIT_S)
        made.append(group)
        topology = find_topology(bundle_nodes(group), read_nodes())
        return group, map_ranks(plan.slots, topology.of_bundle, {"text": degrees})["text"], topology

    yield take
    for group in made:
        remove_placement_group(group)


def test_neighbours_share_a_node_in_the_order_of_its_gpus_and_reach_all_others(reserved: Any, tmp_path: Path) -> None:
    bundles, slots, topology = reserved(4, TWO_PAIRS)
    made = ActorGroup(settings(4, needs={"text.model_name": str(tmp_path)}), slots, bundles)
    try:
        made.start(Trainer)
        told = made.execute_all("about", timeout_s=WAIT_S)
    finally:
        made.stop()
    first, second = ADDRESSES
    wanted = [(first, [0]), (first, [1]), (second, [0]), (second, [1])]
    assert [(rank["address"], rank["gpu"]) for rank in told] == wanted
    assert [rank["reached"] for rank in told] == [4] * 4
    assert {rank["interface"] for rank in told} == {"lo"}  # which carries all of 127.0.0.0/8
    assert topology.names(slots) == [first, first, second, second]


def test_the_order_is_that_of_the_addresses_whichever_node_ray_fills_first(reserved: Any) -> None:
    _, taken, topology = reserved(1, ONE_RANK)
    (busy,) = topology.names(taken)
    _, slots, topology = reserved(3, {"data": 3, "tensor": 1})
    wanted = sorted([*ADDRESSES, *ADDRESSES])
    wanted.remove(busy)
    assert topology.names(slots) == wanted


def test_a_path_that_a_node_lacks_is_told_with_the_node(reserved: Any, tmp_path: Path) -> None:
    bundles, slots, _ = reserved(1, ONE_RANK)
    made = ActorGroup(settings(1, needs={"text.model_name": str(tmp_path / "model")}), slots, bundles)
    try:
        made.start(Trainer)
        with pytest.raises(ConfigError, match=r"/model does not exist on node 127\.0\.0\.[23], where text rank 0 runs"):
            wait_all(made.take_watched(), WAIT_S)
    finally:
        made.stop()


class BatchReader:
    @property
    def node(self) -> str:
        import ray

        return ray.get_runtime_context().get_node_id()


def test_the_dataset_actor_runs_beside_the_driver() -> None:
    actor = DatasetActor(BatchReader, micro_batches=1, shards={"vision": 1})
    try:
        assert actor.ask("node", timeout_s=WAIT_S) == this_node()
    finally:
        actor.stop()


def test_workers_take_turns_on_the_nodes_that_have_the_data(tmp_path: Path) -> None:
    nodes = [node.id for node in read_nodes()]
    file = tmp_path / "a.json"
    file.write_text("[]")
    needs = {"data.data_registry.a.annotation_path": str(file), "data.data_registry.a.data_path": str(tmp_path)}
    found = reader_nodes(nodes, needs, WAIT_S)
    assert sorted(found) == sorted(nodes) and found[0] == this_node()
    actor = DatasetActor(BatchReader, micro_batches=1, shards={"vision": 1}, workers=3, nodes=found)
    try:
        import ray

        at = ray.get([one.ask.remote("node") for one in actor._actors], timeout=WAIT_S)
        assert at == [this_node(), found[0], found[1], found[0]]
    finally:
        actor.stop()


def test_a_node_with_other_annotations_reads_none() -> None:
    needs = {"data.data_registry.a.annotation_path": "/proc/self/stat"}  # there, but another one in each process
    assert reader_nodes([node.id for node in read_nodes()], needs, WAIT_S) == [this_node()]


def test_what_is_missing_is_told_node_by_node(reserved: Any) -> None:
    for asked, missing in ((5, "all nodes together have room for 4: 1 CPU and 1 GPU missing"), (4, "room for 3 now")):
        with pytest.raises(ConfigError) as caught:
            reserve(plan_placement({"vision": range(asked)}, gpus=8), 0.5)
        assert missing in str(caught.value)
        assert all(f"{address} has 2 CPU (" in str(caught.value) for address in ADDRESSES)
        reserved(1, ONE_RANK)  # from now on, other work holds one
