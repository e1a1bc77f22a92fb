"""Axes, kinds, degrees, dispatch, parameters and states."""

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from dhp.core import axes, kinds
from dhp.core.axes import Degrees
from dhp.core.dispatch import PerRank, per_rank, spread
from dhp.core.graph import Node, Route, dense, part_of, straight
from dhp.core.kinds import StageKind, tokens_of
from dhp.core.parameters import (
    ALL,
    COMPENSATION,
    EXACT_STATES,
    FORMAT_BYTES,
    FORMS,
    MASTER,
    MOMENTS,
    SUM,
    WEIGHT,
    GroupRule,
    ParameterGroup,
    Selector,
    TrainingRules,
    is_inside,
)
from dhp.core.tracing import ALL_REDUCE, HANDOFF, RING, add_sent, take_sent
from dhp.engine.encoder_engine import EncoderEngine
from dhp.engine.engines import make_rank
from tests.helpers.graphs import make_graph

ROOT = Path(__file__).parents[2]
LINE = 'Axis("context", ROW, every_layer=True),'


@pytest.fixture
def with_context(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The file with the page's line, between ring and ulysses, and the field of that name."""
    source = Path(axes.__file__).read_text()
    page = (ROOT / "docs" / "developers" / "adding-an-axis.md").read_text()
    assert LINE in page
    source = source.replace('    Axis("ulysses"', f'    {LINE}\n    Axis("ulysses"', 1)
    source = source.replace("    tensor: int = 1\n", "    tensor: int = 1\n    context: int = 1\n", 1)
    module = ModuleType("axes_with_context")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # where dataclasses look for their types
    exec(compile(source, axes.__file__, "exec"), module.__dict__)
    return module


def test_meshes_groups_and_words_follow_from_the_record(with_context: ModuleType) -> None:
    split = with_context.Degrees(data=2, context=3, ulysses=2, tensor=2)
    assert with_context.MESH == ("data", "ring", "context", "ulysses", "tensor")
    assert with_context.OF_ROWS == ("ring", "context", "ulysses") and "context" in with_context.EVERY_LAYER
    assert split.along(*with_context.MESH) == (2, 1, 3, 2, 2)
    assert (split.world, split.shards, split.sequence, split.holders, split.divided) == (24, 12, 6, (0, 1), 4)
    assert split.by_axis() == {"data": 2, "ring": 1, "context": 3, "ulysses": 2, "tensor": 2}
    assert str(split) == "data 2 × context 3 × ulysses 2 × tensor 2"
    assert with_context.Degrees.read({"context": 4}.get).context == 4


def test_nobody_else_lists_the_axes() -> None:
    """Lists of axes' names stand in the record's file alone, and in rules of the configuration and of parts."""
    several = re.compile(r'"(?:data|ring|ulysses|tensor)", "(?:data|ring|ulysses|tensor)"')
    files = [file for file in (ROOT / "dhp").rglob("*.py") if several.search(file.read_text())]
    assert {file.relative_to(ROOT / "dhp").parts[0] for file in files} <= {"config", "models"}


@pytest.mark.parametrize(("word", "most"), [("expert", 14), ("ulysses", 13)])
def test_few_files_name_an_axis(word: str, most: int) -> None:
    """In code: names and strings; neither prose nor the folder of that name."""
    import ast

    named = re.compile(rf"(?<![A-Za-z_]){word}(?![A-Za-z_])")
    found = set()
    for file in (file for file in (ROOT / "dhp").rglob("*.py") if named.search(file.read_text())):
        for node in ast.walk(ast.parse(file.read_text())):
            text = getattr(node, "attr", None) or getattr(node, "id", None) or getattr(node, "arg", None)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value:
                text = node.value if len(node.value) < 60 else None
            if isinstance(text, str) and named.fullmatch(text):
                found.add(str(file.relative_to(ROOT / "dhp")))
    assert len(found) <= most, sorted(found)


def test_ranks_that_share_out_experts_are_an_axis_inside_of_data() -> None:
    split = Degrees(data=6, expert=2)
    assert split.by_axis() == {"data": 3, "expert": 2, "ring": 1, "ulysses": 1, "tensor": 1}
    assert (split.world, split.shards, split.holders) == (6, 6, (0, 1))
    assert Degrees(data=2, tensor=4).by_axis() == {"data": 2, "ring": 1, "ulysses": 1, "tensor": 4}
    assert Degrees(data=2, tensor=4).holders == (0, 1, 2, 3)
    assert [Degrees(data=4, expert=2, ring=3, tensor=5).copies, Degrees(data=4, ring=3).copies] == [6, 12]
    assert Degrees(data=4, expert=2, ulysses=3).holders == (0, 3)  # the first rank of each neighbour's row


def test_they_are_told() -> None:
    assert str(Degrees(data=6, expert=2)) == "data 6 (expert 2)"
    assert str(Degrees()) == "one rank"


TOKENS = np.array([0, 1, 2, 3, 4, 0])
RADAR = StageKind("radar", "dhp.engine.encoder_engine:EncoderEngine", tokens=(4,), counted="echoes")


@pytest.fixture
def radar(monkeypatch: pytest.MonkeyPatch) -> StageKind:
    monkeypatch.setitem(kinds.KINDS, "radar", RADAR)
    return RADAR


def test_each_encoder_has_the_tokens_of_its_kind(radar: StageKind) -> None:
    parts = ("vision", "audio", "radar", "text")
    found = {part: tokens_of(part, TOKENS, parts).tolist() for part in parts[:-1]}
    assert found["vision"] == [False, True, True, False, False, False]
    assert found["audio"] == [False, False, False, True, False, False]
    assert found["radar"] == [False, False, False, False, True, False]


def test_tokens_of_a_part_that_a_run_has_not_are_visions() -> None:
    """Some families number kinds of pictures on from 2."""
    assert tokens_of("vision", TOKENS, ("vision", "text")).tolist() == [False, True, True, True, True, False]


def test_its_ranks_are_of_its_engine(radar: StageKind, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EncoderEngine, "__init__", lambda self, settings: None)
    settings: Any = SimpleNamespace(spec=SimpleNamespace(part="radar", name="radar"))
    assert type(make_rank(settings)) is EncoderEngine


def test_its_count_says_whether_a_step_has_work_for_it(radar: StageKind) -> None:
    engine = object.__new__(EncoderEngine)
    engine.spec = SimpleNamespace(part="radar")
    for echoes in (0, 3):
        assert engine.is_active(SimpleNamespace(images=1, echoes=echoes, total_weight=2)) == (echoes > 0)


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


def test_a_plain_argument_goes_to_every_rank_even_when_its_length_is_the_number_of_ranks() -> None:
    assert spread(([1, 2], "x"), 2) == [([1, 2], "x"), ([1, 2], "x")]


def test_values_per_rank_go_one_to_each() -> None:
    assert spread((7, per_rank(v * v for v in range(3))), 3) == [(7, 0), (7, 1), (7, 4)]
    assert per_rank([3, 4]) == PerRank((3, 4))


def test_no_argument_is_an_empty_tuple_for_each_rank() -> None:
    assert spread((), 2) == [(), ()]


def test_a_wrong_number_of_values_is_refused() -> None:
    with pytest.raises(ValueError, match="2 values for 3 ranks"):
        spread((per_rank("ab"),), 3)


NAMES = (
    "model.visual.blocks.1.attn.qkv.weight",
    "model.visual.merger.mlp.0.weight",
    "model.language_model.layers.1.self_attn.q_proj.weight",
    "model.language_model.layers.1.self_attn.q_proj.bias",
    "model.language_model.layers.11.mlp.up_proj.weight",
    "model.language_model.norm.weight",
    "lm_head.weight",
)


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("merger", [1]),
        ("layers.1", [2, 3]),  # not layers.11
        ("q_proj", [2, 3]),
        ("q_proj.bias", [3]),
        ("*bias", [3]),
        ("*norm*", [5]),
        ("norm", [5]),
        ("layers.1?", [4]),
        ("layers.[02-9]", []),
        ("layers.[1]", [2, 3]),
        ("model.*.weight", [0, 1, 2, 4, 5]),
        ("proj", []),  # a piece is a whole name between dots
        ("*_proj", [2, 3, 4]),
        ("lm_head.weight", [6]),
        ("language_model.norm.weight", [5]),
        ("l.norm", []),
        ("mlp.0.weigh", []),
        ("(merger)+", []),  # of a regular expression nothing means anything
        ("mo.el", []),
    ],
)
def test_a_pattern_names_whole_pieces(pattern: str, found: list[int]) -> None:
    assert [at for at, name in enumerate(NAMES) if Selector(pattern).fits(name)] == found


def test_a_part_is_its_modules_without_those_of_another() -> None:
    tower = Selector("vision", ("model.visual",), ("model.visual.merger",))
    assert [name for name in NAMES if tower.fits(name)] == [NAMES[0]]
    assert is_inside("model.visual", ["model.visual"]) and not is_inside("model.visuals.a", ["model.visual"])


def test_what_is_frozen_beats_what_is_trainable() -> None:
    rules = TrainingRules((Selector("layers.*"), Selector("merger")), (Selector("*bias"),))
    assert [name for name in NAMES if rules.trains(name)] == [NAMES[1], NAMES[2], NAMES[4]]
    assert rules.selects and not ALL.selects and all(map(ALL.trains, NAMES))


def test_later_groups_beat_earlier_ones_in_what_they_say() -> None:
    rules = TrainingRules(
        groups=(
            GroupRule("deep", (Selector("layers.11"), Selector("norm")), 0.1, None, 5),
            GroupRule("light", (Selector("*norm*"),), None, 0.0),
            GroupRule("still", (Selector("lm_head"),)),
        )
    )
    default = ParameterGroup("text", 1.0, 0.5, 2)
    assert rules.group(NAMES[2], default) == default
    assert rules.group(NAMES[4], default) == ParameterGroup("deep", 0.1, 0.5, 5)
    assert rules.group(NAMES[5], default) == ParameterGroup("deep+light", 0.1, 0.0, 5)
    assert rules.group(NAMES[6], default) == ParameterGroup("still", 1.0, 0.5, 2)


def test_what_no_rule_is_about_has_no_rules_name() -> None:
    rules = TrainingRules(groups=(GroupRule("vision", (Selector("visual"),)), GroupRule("rest of vision", ())))
    assert rules.default_name("vision") == "rest of rest of vision" and rules.default_name("text") == "text"


@pytest.mark.parametrize("nbytes", FORMS)
def test_a_form_is_known_by_the_bytes_of_its_pieces(nbytes: int) -> None:
    form = FORMS[nbytes]
    assert form.nbytes == sum(getattr(torch, piece.format).itemsize for piece in form.pieces) == nbytes
    kinds = [piece.kind for piece in form.pieces]
    assert len(set(kinds)) == len(kinds) and {WEIGHT, SUM, *MOMENTS} < set(kinds)
    assert (MASTER in kinds) != (COMPENSATION in kinds) == form.compensated


def test_bytes_of_each_format_are_torchs() -> None:
    assert {name: getattr(torch, name).itemsize for name in FORMAT_BYTES} == FORMAT_BYTES


def test_equations() -> None:
    assert FORMS[EXACT_STATES].equation == "weight(2) + master(4) + sum(4) + exp_avg(4) + exp_avg_sq(4) = 18"
    assert FORMS[12].equation == "weight(2) + compensation(2) + sum(4) + exp_avg(2) + exp_avg_sq(2) = 12"
    assert [FORMS[n].format(SUM) for n in FORMS] == ["float32", "bfloat16", "float32", "bfloat16"]
    with pytest.raises(KeyError):
        FORMS[12].format(MASTER)


def test_the_page_about_memory_has_each_form() -> None:
    page = (Path(__file__).parents[2] / "docs" / "memory.md").read_text(encoding="utf-8")
    for nbytes, form in FORMS.items():
        kinds = {piece.kind: piece for piece in form.pieces}
        (copy,) = kinds.keys() - {WEIGHT, SUM, *MOMENTS}
        formats = (kinds[WEIGHT].format, f"{copy}, {kinds[copy].format}", kinds[SUM].format, kinds[MOMENTS[0]].format)
        gathered = nbytes if form.compensated else nbytes - kinds[WEIGHT].nbytes  # from the master weight itself
        assert f"| {' | '.join(map(str, (nbytes, *formats, gathered)))} |" in page


def test_bytes_add_up_and_are_taken_once() -> None:
    take_sent()
    for kind, nbytes in ((ALL_REDUCE, 8 / 3), (HANDOFF, 5), (ALL_REDUCE, 16 / 3), (RING, 0)):
        add_sent(kind, nbytes)
    assert take_sent() == {ALL_REDUCE: 8, HANDOFF: 5}
    assert take_sent() == {}
