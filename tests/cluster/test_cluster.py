"""What a cluster says of itself."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from dhp.cluster import cluster as cluster_module
from dhp.cluster.address import LOCAL
from dhp.cluster.cluster import GROUP_LATER_S, Cluster, ClusterSpec, _make_lookout
from dhp.cluster.placement.nodes import ClusterNode
from dhp.cluster.placement.reservation import Topology
from dhp.core.graph import StageGraph
from tests.helpers.graphs import make_graph


@pytest.mark.parametrize(
    ("graph", "told"),
    [
        (make_graph(), "1 vision and 1 text actors on cpu, sharing devices"),
        (make_graph(stages=3), "1 vision, 1 text.0, 1 text.1 and 1 text.2 actors on cpu, sharing devices"),
    ],
)
def test_it_lists_its_actors(graph: StageGraph, told: str) -> None:
    cluster = Cluster(ClusterSpec(graph, "cpu", LOCAL, 1, 60.0, 60.0, "logs", "checkpoints"))
    cluster.device, cluster._where = "cpu", ""
    assert cluster.describe() == told


@pytest.mark.parametrize(("connected", "own"), [(True, ""), (False, "head")])
def test_through_the_client_no_node_is_the_drivers(monkeypatch: pytest.MonkeyPatch, connected: bool, own: str) -> None:
    """The head's ids of processes mean others, or none, on the client's machine, where each would count as gone."""
    monkeypatch.setattr(cluster_module, "client", SimpleNamespace(is_connected=lambda: connected), raising=False)
    monkeypatch.setattr(cluster_module, "own_node", lambda: "head")
    layout = ClusterSpec(make_graph(), "cpu", "ray://head:10001", 1, 60.0, 60.0, "logs", "checkpoints")
    topology = Topology([ClusterNode("head", "10.0.0.1", "10.0.0.1", {}, {})], [0])
    lookout = _make_lookout(layout, topology)
    assert (lookout._own_node, lookout.node_name("head")) == (own, "10.0.0.1")


def test_a_groups_own_limit_leaves_time_for_a_checkpoint_that_the_next_step_waits_for() -> None:
    for saving_s in (0.0, 1800.0):
        layout = ClusterSpec(make_graph(), "cpu", LOCAL, 1, 60.0, 60.0, "logs", "checkpoints", saving_s=saving_s)
        cluster = Cluster(layout)
        cluster.device = "cpu"
        assert cluster._common("gloo", 1)["collective_s"] == 600.0 + saving_s + GROUP_LATER_S
