"""A graph of stages as values: what leads where, what goes back, who shares devices."""

from __future__ import annotations

from dhp.core.axes import Degrees
from dhp.core.graph import Node, Route, dense, part_of, straight
from tests.helpers.graphs import make_graph


def test_a_micro_batch_visits_chunks_in_the_order_of_the_layers() -> None:
    graph = make_graph(stages=2, chunks=2)
    assert [str(node) for node in graph.nodes()] == ["vision", "text.0", "text.1", "text.0/1", "text.1/1"]
    assert graph.stage("text.0").chunks == (range(0, 1), range(2, 3))
    assert graph.stage("text.1").layers == (1, 3)
    assert [part_of(stage.name) for stage in graph.stages] == ["vision", "text", "text"]


def test_edges_lead_from_run_to_run_and_tensors_to_where_they_enter() -> None:
    graph = make_graph(stages=2, chunks=2, enters={"deepstack.0": 0, "deepstack.1": 1, "deepstack.2": 2})
    assert [str(edge) for edge in graph.edges] == [
        "vision → text.0: embeddings, deepstack.0",
        "vision → text.1: deepstack.1",
        "vision → text.0/1: deepstack.2",
        "text.0 → text.1: hidden_states",
        "text.1 → text.0/1: hidden_states",
        "text.0/1 → text.1/1: hidden_states",
    ]
    assert graph.inputs(Node("text.0", 1)) == (graph.edges[2], graph.edges[4])


def test_nothing_goes_back_through_what_is_frozen_with_all_before_it() -> None:
    frozen_tower = make_graph(stages=2, vision_trains=False)
    assert [frozen_tower.goes_back(node) for node in frozen_tower.nodes()] == [False, True, True]
    assert str(frozen_tower.edges[0]) == "vision → text.0: embeddings, no gradients back"
    frozen_text = make_graph(stages=2, text_trains=False)
    assert all(frozen_text.goes_back(node) for node in frozen_text.nodes())
    assert all(edge.gradients for edge in frozen_text.edges)


def test_stages_of_a_pipeline_share_devices_with_vision_alone() -> None:
    graph = make_graph(Degrees(data=4), Degrees(tensor=2), stages=2)
    assert [list(stage.devices) for stage in graph.stages] == [[0, 1, 2, 3], [0, 1], [2, 3]]
    assert (graph.sharing(), graph.device_count(), graph.ranks_of("text")) == (2, 4, 4)


def test_routes_by_either_end() -> None:
    route = Route(((0, 1), (0, 2), (3, 1)))
    assert route.targets == {0: (1, 2), 3: (1,)} and route.sources == {1: (0, 3), 2: (0,)}
    assert straight(2).pairs == ((0, 0), (1, 1))
    assert dense(2, 2).pairs == ((0, 0), (0, 1), (1, 0), (1, 1))


def test_shards_are_what_tensor_ranks_share() -> None:
    degrees = Degrees(data=2, ring=3, ulysses=2, tensor=4)
    assert (degrees.world, degrees.shards, degrees.sequence) == (48, 12, 6)
