"""What a person reads when the cluster does not give enough."""

from __future__ import annotations

from dhp.cluster.placement.nodes import ClusterNode, describe_shortage, free_bundles, natural
from dhp.cluster.placement.reservation import find_topology, plan_placement

DEVICE = {"CPU": 1.0, "GPU": 1.0}


def node(last: int, total: tuple[float, float], free: tuple[float, float] | None = None) -> ClusterNode:
    """CPU and GPU."""
    amounts = [dict(zip(("CPU", "GPU"), pair, strict=True)) for pair in (total, free or total)]
    return ClusterNode(f"id{last}", f"10.0.0.{last}", f"10.0.0.{last}", *amounts)


def test_a_cluster_that_is_too_small() -> None:
    told = describe_shortage(DEVICE, 8, False, [node(5, (16, 4), (16, 2))])
    assert told == (
        "8 × 1 CPU and 1 GPU asked for, and all nodes together have room for 4: 4 GPU missing. "
        "Registered: 10.0.0.5 has 16 CPU (16 free) and 4 GPU (2 free). "
        "Add nodes (`ray start --address=…`), or ask for fewer actors (num_actors of each part)"
    )


def test_sharing_is_proposed_where_parts_are_apart() -> None:
    assert describe_shortage(DEVICE, 8, True, [node(5, (16, 4))]).endswith("share devices (cluster.collocate=true)")


def test_a_cluster_that_is_busy() -> None:
    told = describe_shortage(DEVICE, 4, False, [node(5, (8, 2), (8, 0)), node(6, (8, 2), (7, 1))])
    assert "there is room for 1 now, as other work holds the rest: 3 GPU missing" in told
    assert "10.0.0.5 has 8 CPU (8 free) and 2 GPU (0 free); 10.0.0.6 has 8 CPU (7 free) and 2 GPU (1 free)" in told
    assert "Wait longer (cluster.start_timeout_s), end other work" in told


def test_room_is_counted_by_whole_bundles_of_a_node() -> None:
    nodes = [node(5, (8, 2), (8, 1.5)), node(6, (8, 2), (1, 2)), node(7, (8, 2), (0, 2))]
    assert free_bundles(DEVICE, nodes) == 2
    assert free_bundles({"CPU": 1.0, "GPU": 0.5}, nodes) == 4
    assert free_bundles({"CPU": 4.0}, nodes) == 2


def test_nodes_of_which_none_holds_a_single_device() -> None:
    told = describe_shortage(DEVICE, 2, False, [node(5, (8, 0)), node(6, (0, 2))])
    assert "no node has 1 CPU and 1 GPU together" in told and "--num-cpus" in told
    assert "No node is registered" in describe_shortage(DEVICE, 2, False, [])


def test_cpus_may_be_what_is_missing() -> None:
    assert "room for 2: 2 CPU missing" in describe_shortage(DEVICE, 4, False, [node(5, (2, 8))])


def test_amounts_that_lie_on_different_nodes() -> None:
    told = describe_shortage(DEVICE, 4, False, [node(5, (1, 4)), node(6, (4, 1))])
    assert "room for 2: what there is lies on different nodes" in told


def test_shares_of_a_gpu_do_not_reach_from_one_to_the_next() -> None:
    share = {"CPU": 0.5, "GPU": 0.4}
    told = describe_shortage(share, 6, False, [node(5, (8, 2))])
    assert "room for 4: 0.8 GPU missing" in told


def test_room_that_came_too_late() -> None:
    assert "room for them by now" in describe_shortage(DEVICE, 2, False, [node(5, (8, 2))])


def test_a_long_list_of_nodes_is_cut() -> None:
    told = describe_shortage(DEVICE, 99, False, [node(last, (8, 1)) for last in range(1, 31)])
    assert told.count(" has 8 CPU") == 16 and "and 14 more nodes" in told


def test_addresses_are_sorted_as_numbers() -> None:
    addresses = ["10.0.0.10", "10.0.0.9", "9.1.1.1", "node-b", "node-10", "node-9"]
    assert sorted(addresses, key=natural) == ["node-9", "node-10", "node-b", "9.1.1.1", "10.0.0.9", "10.0.0.10"]


def test_ranks_by_node_in_words() -> None:
    topology = find_topology(["id6", "id5", "id5", "id6"], [node(4, (9, 9)), node(5, (8, 2)), node(6, (6, 2))])
    slots = plan_placement({"vision": range(1), "text": range(4)}, gpus=4).slots
    assert topology.describe(slots) == "10.0.0.5 (text 1-2), 10.0.0.6 (vision 0, text 0+3)"
    assert topology.names(slots["text"]) == ["10.0.0.6", "10.0.0.5", "10.0.0.5", "10.0.0.6"]
    assert topology.threads(slots) == 3
    assert not topology.only("id5") and find_topology(["id5"], topology.nodes).only("id5")
