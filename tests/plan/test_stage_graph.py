"""From a configuration and a model's shape to the graph of stages."""

from __future__ import annotations

import pytest

from dhp.config.command_line import compose_config
from dhp.config.resolve import resolve
from dhp.core.errors import ConfigError
from dhp.core.graph import Tie
from dhp.plan.run_plan import plan_run


def graph_of(model: str, *overrides: str):
    names = [f"{part}.model_name={model}" for part in ("vision", "text")]
    config = resolve(compose_config("tiny", overrides=[*names, *overrides]))
    return plan_run(config, model).graph


def test_a_pair_on_shared_devices(made_model: str) -> None:
    graph = graph_of(made_model)
    assert [(s.name, s.chunks, list(s.devices), s.trains) for s in graph.stages] == [
        ("vision", (range(4),), [0, 1], True),
        ("text", (range(2),), [0, 1], True),
    ]
    assert graph.ties == ()


def test_apart_each_stage_has_devices_of_its_own(four_layers_model: str) -> None:
    cut = ("text.parallelism=tensor", "text.pipeline=2", "text.num_actors=4", "cluster.collocate=false")
    graph = graph_of(four_layers_model, *cut)
    assert [list(stage.devices) for stage in graph.stages] == [[0, 1], [2, 3], [4, 5]]
    assert graph.sharing() == 1


def test_apart_the_decoder_comes_behind_all_stages_of_the_tower(four_layers_model: str) -> None:
    tower = ("vision.parallelism=pipeline", "vision.num_actors=3", "vision.zero_stage=0", "vision.cuts=[1,2]")
    graph = graph_of(four_layers_model, *tower, "cluster.collocate=false")
    assert [list(stage.devices) for stage in graph.stages] == [[0], [1], [2], [3, 4]]


def test_virtual_stages_take_runs_of_layers_in_turn(four_layers_model: str) -> None:
    cut = ("text.parallelism=pipeline", "text.num_actors=2", "text.virtual_stages=2", "text.cuts=[1,2,3]")
    graph = graph_of(four_layers_model, *cut, "training.schedule=interleaved")
    assert [stage.layers for stage in graph.of_part("text")] == [(0, 2), (1, 3)]
    assert [str(edge.target) for edge in graph.edges] == ["text.0", "text.1", "text.0/1", "text.1/1"]


def test_gradients_go_back_to_a_trained_tower_through_frozen_stages(four_layers_model: str) -> None:
    cut = ("text.parallelism=pipeline", "text.num_actors=3", "text.cuts=[1,2]", "training.frozen=[text]")
    graph = graph_of(four_layers_model, *cut)
    assert [stage.trains for stage in graph.stages] == [True, False, False, False]
    assert [edge.gradients for edge in graph.edges] == [True, True, True]


def test_cuts_as_they_are_given_and_tied_ends(tied_model: str) -> None:
    cut = ("text.parallelism=pipeline", "text.num_actors=3", "text.cuts=[1,2]", "training.frozen=[vision,projector]")
    graph = graph_of(tied_model, *cut, "vision.zero_stage=0")
    assert [stage.chunks for stage in graph.of_part("text")] == [(range(0, 1),), (range(1, 2),), (range(2, 4),)]
    assert graph.ties == (Tie("text.0", "text.2"),)
    assert [edge.gradients for edge in graph.edges] == [False, True, True]


def test_features_of_the_tower_go_to_the_stage_of_their_layer(qwen3_vl_model: str) -> None:
    graph = graph_of(qwen3_vl_model, "text.parallelism=pipeline", "text.num_actors=2", "text.cuts=[2]")
    assert [edge.tensors for edge in graph.edges[:2]] == [
        ("embeddings", "deepstack.0", "deepstack.1"),
        ("deepstack.2",),
    ]


def test_a_tower_in_stages_sends_its_features_from_the_stage_of_each(qwen3_vl_model: str) -> None:
    graph = graph_of(qwen3_vl_model, "vision.parallelism=pipeline", "vision.zero_stage=0", "vision.cuts=[1]")
    layers = [stage.layers for stage in graph.of_part("vision")]
    assert layers[0] == (0,) and layers[1][0] == 1
    assert [(str(edge.source), str(edge.target), edge.tensors) for edge in graph.edges] == [
        ("vision.0", "vision.1", ("hidden_states",)),
        ("vision.0", "text", ("deepstack.0",)),
        ("vision.1", "text", ("embeddings", "deepstack.1", "deepstack.2")),
    ]


def test_a_chain_shares_the_devices_between_the_parts(four_layers_model: str) -> None:
    tower = ("vision.parallelism=tensor", "vision.pipeline=2", "vision.num_actors=4", "vision.zero_stage=0")
    decoder = ("text.parallelism=tensor", "text.pipeline=3", "text.num_actors=6", "text.cuts=[1,2]")
    graph = graph_of(four_layers_model, *tower, *decoder, "cluster.chain=true")
    assert [(stage.name, list(stage.devices)) for stage in graph.stages] == [
        ("vision.0", [0, 1]),
        ("vision.1", [2, 3]),
        ("text.0", [2, 3]),
        ("text.1", [4, 5]),
        ("text.2", [6, 7]),
    ]
    assert (graph.device_count(), graph.sharing()) == (8, 2)


def test_nothing_goes_back_to_a_tower_stage_before_the_first_trained_layer(four_layers_model: str) -> None:
    tower = ("vision.parallelism=pipeline", "vision.zero_stage=0", "vision.cuts=[2]")
    graph = graph_of(four_layers_model, *tower, 'training.frozen=["blocks.[01]",patch_embed]')
    assert [stage.trains for stage in graph.of_part("vision")] == [False, True]
    assert [edge.gradients for edge in graph.edges] == [False, True]
    assert not graph.goes_back(graph.stages[0].nodes[0])


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (("vision.num_actors=5",), r"vision\.pipeline=5 .* vision has 4: pipeline\(5\).* Set vision\.pipeline to 4"),
        (("vision.cuts=[4]",), r"vision\.cuts=\[4\] cannot cut the 4 layers of vision.* but between layers"),
    ],
)
def test_cuts_that_a_tower_does_not_admit(four_layers_model: str, given: tuple[str, ...], wanted: str) -> None:
    with pytest.raises(ConfigError, match=wanted):
        graph_of(four_layers_model, "vision.parallelism=pipeline", "vision.zero_stage=0", *given)
