"""Where vision replicas lie from each text replica."""

from __future__ import annotations

from dhp.core.axes import Degrees
from dhp.core.graph import RankDevice
from dhp.plan.stage_graph import devices_as_planned, find_localities
from tests.helpers.graphs import make_graph


def test_replicas_that_share_devices_are_nearest() -> None:
    graph = make_graph(Degrees(data=4), Degrees(data=2, tensor=2))
    (locality,) = find_localities(graph, devices_as_planned(graph), 0.01).values()
    assert locality.distances == ((0, 0, 1, 1), (1, 1, 0, 0)) and locality.slack == 0.01


def test_nodes_come_next() -> None:
    graph = make_graph(Degrees(data=4), Degrees(data=2, tensor=2))
    own = [RankDevice(device, device // 2) for device in range(4)]
    assert find_localities(graph, {"vision": own, "text": own}, 0.0)["vision"].distances == ((0, 0, 2, 2), (2, 2, 0, 0))


def test_the_first_stage_of_a_pipeline_counts() -> None:
    graph = make_graph(Degrees(data=4), Degrees(data=2), stages=2)
    assert find_localities(graph, devices_as_planned(graph), 0.0)["vision"].distances == ((0, 1, 1, 1), (1, 0, 1, 1))


def test_one_vision_replica_has_no_choice() -> None:
    graph = make_graph(Degrees(ulysses=4), Degrees(data=2))
    assert find_localities(graph, devices_as_planned(graph), 0.01) == {}
