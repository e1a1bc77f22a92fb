"""A model with an encoder that dhp does not have: nothing of run/, step/ and cluster/ asks which parts there are."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

import pytest

from dhp.config.command_line import compose_config
from dhp.config.layout import resolve_part
from dhp.config.resolve import resolve
from dhp.config.schema import Config, PartConfig
from dhp.core.batch import Batch
from dhp.core.graph import Edge, Node, Route, StageGraph, dense
from dhp.models.family import Family
from dhp.models.registry import load_family
from dhp.models.types import LayerParts, Part
from dhp.plan.batches import feed_settings
from dhp.plan.count.counted_model import Counted
from dhp.plan.stage_graph import devices_as_planned, find_localities, make_graph, world
from dhp.plan.trainable import training_rules
from dhp.step.schedule import draw, make_schedule
from dhp.step.stages import make_stages
from dhp.step.step import train_step
from dhp.trainer.recipe import free_layout
from dhp.trainer.settings import measures, needed_paths, stage_settings
from tests.step.test_step import Call, FakeGroup

ROOT = Path(__file__).parents[2]


@dataclass
class WithRadar(Config):
    """A configuration with one part more."""

    radar: PartConfig = field(default_factory=PartConfig)


class Radar(Part):
    """An encoder of two layers. What it makes enters the decoder at its start and behind its second layer."""

    modules = ("model.radar_tower",)
    tensors = ("radar_embeddings", "radar_features")
    layers = LayerParts("model.radar_tower.layers", (), (), ("radar",) * 2)

    def check(self, asked: PartConfig) -> None:
        """Any degrees will do."""


def with_radar(model: str) -> tuple[WithRadar, Family]:
    """Vision on 2 ranks, radar on 3, text in two stages of two layers each; nothing of radar is trained."""
    names = [f"{part}.model_name={model}" for part in ("vision", "text")]
    plain = resolve(compose_config("tiny", overrides=[*names, "text.parallelism=pipeline", "text.num_actors=2"]))
    asked = PartConfig(model, "data", 3, dtype="bfloat16", recompute="auto")
    config = WithRadar(**{f.name: getattr(plain, f.name) for f in fields(plain)}, radar=resolve_radar(asked))
    family = load_family(model)
    config.training.frozen = ["radar"]
    decoder = family.decoder

    class Senses(type(decoder)):
        @property
        def takes(self) -> dict[str, int]:
            return {**super().takes, "radar_embeddings": 0, "radar_features": 2}

    decoder.__class__ = Senses
    return config, replace(family, others={"radar": Radar()})


def resolve_radar(asked: PartConfig) -> PartConfig:
    """By the rules of an encoder that there is."""
    return resolve_part("vision", asked)


@pytest.fixture(scope="module")
def heard(four_layers_model: str) -> tuple[WithRadar, StageGraph]:
    config, family = with_radar(four_layers_model)
    counted = Counted(family, four_layers_model, training_rules(config.training, family), {}, "sft")
    return config, make_graph(config, counted)


def test_its_stage_and_edges_are_in_the_chain(heard: tuple[WithRadar, StageGraph]) -> None:
    _, graph = heard
    assert [(s.name, s.degrees.world, s.trains) for s in graph.stages] == [
        ("vision", 2, True), ("radar", 3, False), ("text.0", 1, True), ("text.1", 1, True),
    ]  # fmt: skip
    first, second = Node("text.0"), Node("text.1")
    assert set(graph.edges) == {
        Edge(Node("vision"), first, ("embeddings",), True),
        Edge(Node("radar"), first, ("radar_embeddings",), False),
        Edge(Node("radar"), second, ("radar_features",), False),
        Edge(first, second, ("hidden_states",), True),
    }
    assert not graph.goes_back(Node("radar"))


def test_its_settings_come_from_its_own_section(heard: tuple[WithRadar, StageGraph]) -> None:
    config, graph = heard
    assert list(world(config)) == ["vision", "radar", "text"]
    assert world(config)["radar"]["data"] == 3
    assert free_layout(config)["radar.dtype"] == "bfloat16"
    assert set(needed_paths(config, None)) == {"vision", "radar", "text", "data"}
    assert measures(config)
    assert not measures(replace(config, radar=replace(config.radar, recompute="none")))
    own = stage_settings(config, graph, graph.stage("radar"), "cpu", 10)
    assert (own.dtype, own.recompute) == ("bfloat16", ("none", "none"))
    encoders = feed_settings(config, find_localities(graph, devices_as_planned(graph), 0.01)).encoders
    assert (encoders["radar"].replicas, encoders["radar"].dtype) == (3, "bfloat16")
    assert encoders["radar"].locality.distances == ((0, 1, 1),)  # the first of them is on the first text stage's device
    assert set(encoders) == {"vision", "radar"}


def test_a_step_sends_its_rows_to_both_text_stages(heard: tuple[WithRadar, StageGraph]) -> None:
    _, graph = heard
    schedule = make_schedule("1f1b", graph, 2)
    assert draw(schedule, graph).splitlines() == [
        "vision 0 1 . .  .  0' .  1'",
        "radar  0 1 . .  .  .  .  .",
        "text.0 . 0 1 .  0' .  1' .",
        "text.1 . . 0 0' 1  1' .  .",
    ]
    calls: list[Call] = []
    stages = make_stages(graph, {s.name: FakeGroup(s.name, s.degrees.world, calls) for s in graph.stages})
    ranks = {"vision": 2, "radar": 3, "text": 1}
    work = {part: [[f"{part}{m}:{shard}" for shard in range(n)] for m in (0, 1)] for part, n in ranks.items()}
    routes = {"vision": [dense(2, 1)] * 2, "radar": [Route(((1, 0),))] * 2}
    train_step(stages, schedule, graph.ties, Batch("info", work, routes))
    given = [(c.stage, c.arguments[2:]) for c in calls if c.method == "forward_step" and c.arguments[0] == 1]
    assert given == [
        *(("vision", (f"vision1:{rank}",)) for rank in (0, 1)),
        *(("radar", (f"radar1:{rank}",)) for rank in (0, 1, 2)),
        ("text.0", ("text1:0", "e10:vision0#0", "e10:vision1#0", "e10:radar1#0")),
        ("text.1", ("text1:0", "e10:radar1#1", "e10:text.00#0")),
    ]
    assert {c.stage for c in calls if c.method == "backward_step"} == {"vision", "text.0", "text.1"}
    assert {c.stage for c in calls if c.method == "optimizer_step"} == {s.name for s in graph.stages}


@pytest.mark.parametrize("room", ["run", "step", "cluster", "planner"])
def test_no_file_names_a_part(room: str) -> None:
    """A literal "vision", or an attribute .vision of a configuration or .tower of a family, would leave others out."""
    named = {"vision", "text", "audio", "tower", "decoder"}
    for path in sorted((ROOT / "dhp" / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            word = getattr(node, "value", None) if isinstance(node, ast.Constant) else getattr(node, "attr", None)
            assert not (isinstance(word, str) and word in named), f"{path}:{node.lineno} names {word}"
