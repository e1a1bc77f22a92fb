"""Stages, edges, what of them is trained, limits of rows."""

from dataclasses import replace

import numpy as np
import pytest

from dhp.config.command_line import compose_config
from dhp.config.resolve import resolve
from dhp.config.schema import Config
from dhp.config.training import GroupConfig, TrainingConfig
from dhp.core.errors import ConfigError
from dhp.core.graph import Tie
from dhp.core.parameters import TrainingRules
from dhp.data.balance.methods import choose_method
from dhp.data.balance.packs import Loads
from dhp.models.empty import list_parameters
from dhp.models.registry import load_family
from dhp.plan.batches import balance_settings, samples_a_row, unreached
from dhp.plan.count.state_bytes import rank_bytes
from dhp.plan.forecast.moments import shape_of
from dhp.plan.run_plan import plan_run
from dhp.plan.trainable import check_frozen_states, check_rules, part_names, training_rules
from dhp.trainer.settings import table_of_training


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


LAYERS = "model.language_model.layers"


def rules_of(model: str, **asked: object) -> TrainingRules:
    return training_rules(TrainingConfig(**asked), load_family(model))


def trained(model: str, **asked: object) -> list[str]:
    rules = rules_of(model, **asked)
    return [one.name for one in list_parameters(model, load_family(model)) if rules.trains(one.name)]


def config_of(model: str, *overrides: str) -> Config:
    names = [f"{part}.model_name={model}" for part in ("vision", "text")]
    return resolve(compose_config("tiny", overrides=[*names, *overrides]))


def test_parts_and_patterns_together(made_model: str) -> None:
    projector = trained(made_model, trainable=["projector"])
    assert projector and all(name.startswith("model.visual.merger.") for name in projector)
    tower = trained(made_model, trainable=["vision"])
    assert tower and not set(tower) & set(projector)
    text = trained(made_model, frozen=["vision", "projector"])
    assert set(text) == set(trained(made_model)) - set(tower) - set(projector)
    assert set(trained(made_model, trainable=["text"])) == set(text)
    queries = trained(made_model, trainable=["text"], frozen=["layers.0", "embed_tokens", "lm_head", "*norm*", "mlp"])
    assert queries and all(name.startswith(f"{LAYERS}.1.self_attn.") for name in queries)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"frozen": ["visoin"]}, r"training.frozen: visoin is no parameter of this model; did you mean vision\?"),
        ({"trainable": ["q_prj"]}, r"training.trainable: q_prj is no parameter .*; did you mean q_proj\?"),
        ({"frozen": ["layer.0"]}, r"layer.0 is no parameter of this model; did you mean layers.0\?"),
        ({"frozen": ["xyz"]}, r"xyz is no parameter .*Name a part \(vision, text, projector\) or pieces of names, as"),
        ({"frozen": ["audio"]}, r"training.frozen: audio is no parameter of this model"),
        (
            {"groups": {"heads": GroupConfig(["lm_heat"], 0.1)}},
            r"training.groups.heads: lm_heat is no parameter of this model; did you mean lm_head\?",
        ),
        ({"groups": {"projecter": GroupConfig()}}, r"projecter is no parameter .*; did you mean projector\?"),
        (
            {"frozen": ["vision", "projector", "text"]},
            r"training.trainable=\[\] with training.frozen=\[vision, projector, text\]: nothing would be trained",
        ),
        ({"trainable": ["layers.0"], "frozen": ["text"]}, "nothing would be trained"),  # the tower's are called blocks
        ({"trainable": ["layers.[9-0]"]}, r"layers.\[9-0\] is no pattern of parameters' names \(bad character range"),
    ],
)
def test_rules_that_are_about_nothing_are_refused(made_model: str, asked: dict, told: str) -> None:
    family = load_family(made_model)
    with pytest.raises(ConfigError, match=told):
        check_rules(rules_of(made_model, **asked), list_parameters(made_model, family), part_names(family))


def test_a_second_name_of_a_weight_says_the_first(tied_model: str) -> None:
    family = load_family(tied_model)
    with pytest.raises(ConfigError, match="lm_head is no parameter of this model by itself: it is the same weight as"):
        check_rules(rules_of(tied_model, frozen=["lm_head"]), list_parameters(tied_model, family), part_names(family))


@pytest.mark.slow
def test_stages_of_a_pipeline_are_frozen_one_by_one(tied_model: str) -> None:
    cut = ["text.parallelism=pipeline", "text.num_actors=2", "vision.zero_stage=0"]

    def found(*asked: str) -> tuple[list[bool], list[bool], tuple[Tie, ...]]:
        graph = plan_run(config_of(tied_model, *cut, *asked), tied_model).graph
        return [stage.trains for stage in graph.stages], [edge.gradients for edge in graph.edges], graph.ties

    below = "training.frozen=[vision,projector,embed_tokens,layers.0,layers.1]"
    assert found(below) == ([False, False, True], [False, False], (Tie("text.0", "text.1", False),))
    above = "training.trainable=[projector,embed_tokens]"  # which is the head too
    assert found(above) == ([True, True, True], [True, True], (Tie("text.0", "text.1", True),))


def test_zero_of_what_is_not_trained_is_refused(made_model: str) -> None:
    config = config_of(made_model, "training.frozen=[vision,projector]", "vision.zero_stage=1")
    graph = plan_run(config, made_model).graph
    with pytest.raises(
        ConfigError, match="vision.zero_stage=1 with nothing of vision trained.*Set vision.zero_stage=0"
    ):
        check_frozen_states(config, graph)


def test_zero_3_of_what_is_not_trained_is_for_fsdp(made_model: str) -> None:
    given = ("training.frozen=[text]", "text.parallelism=data", "text.num_actors=2", "text.zero_stage=3")
    for engine, fits in (("fsdp", True), ("deepspeed", False)):
        config = config_of(made_model, *given, f"text.zero_engine={engine}")
        plan = plan_run(config, made_model)
        if fits:
            check_frozen_states(config, plan.graph)
            text, shape = plan.graph.stage("text"), shape_of(plan, plan.graph.stage("text"))
            cut, whole = (rank_bytes(replace(config.text, zero_stage=stage), text, shape) for stage in (3, 0))
            assert (cut.gradients, cut.optimizer) == (0, 0) and cut.weights == -(-whole.weights // 2)
            continue
        with pytest.raises(ConfigError, match="DeepSpeed cuts no weights .* Set text.zero_engine=fsdp"):
            check_frozen_states(config, plan.graph)


def test_a_group_named_as_its_part_is_not_the_projectors_too(made_model: str) -> None:
    config = config_of(made_model, "training.groups={vision: {learning_rate: 1e-9}}")
    lines = table_of_training(plan_run(config, made_model))
    assert [line.split()[:2] for line in lines if "1e-09" in line] == [["vision", "vision"]]
    assert [line.split()[0] for line in lines if "rest of vision" in line] == ["projector"]


def test_the_table_says_how_much_is_trained_and_how_fast(made_model: str) -> None:
    config = config_of(
        made_model,
        "training.frozen=[vision]",
        "training.learning_rate=1e-4",
        "training.warmup_ratio=0.03",
        "training.groups={projector: {learning_rate: 1e-3, warmup_steps: 7}, gentle: {parameters: ['*norm*'], "
        "weight_decay: 0}}",
    )
    lines = table_of_training(plan_run(config, made_model))
    cells = {tuple(line.split()[:2]): line.split()[2:] for line in lines[1:-1]}
    sizes = {"projector": 0, "norms": 0, "text": 0, "tower": 0}
    for one in list_parameters(made_model, load_family(made_model)):
        if "merger" in one.name:
            sizes["projector"] += one.size
        elif "visual" in one.name:
            sizes["tower"] += one.size
        elif "norm" in one.name:
            sizes["norms"] += one.size
        else:
            sizes["text"] += one.size
    assert cells == {
        ("vision", "frozen"): [f"{sizes['tower']:,}", "-", "-", "-"],
        ("projector", "projector"): [f"{sizes['projector']:,}", "0.001", "0.01", "7", "steps"],
        ("text", "text"): [f"{sizes['text']:,}", "0.0001", "0.01", "0.03", "of", "all", "steps"],
        ("text", "gentle"): [f"{sizes['norms']:,}", "0.0001", "0", "0.03", "of", "all", "steps"],
    }
    on, all_of_them = sum(sizes.values()) - sizes["tower"], sum(sizes.values())
    assert lines[-1] == f"{on:,} of {all_of_them:,} parameters are trained ({100 * on / all_of_them:.3g}%)"


LOADS = Loads(np.full(4000, 1024), np.full(4000, 2048))


def asked(*settings: str) -> Config:
    return resolve(compose_config("qwen2_5_vl_32b_8gpus", overrides=settings))


@pytest.mark.parametrize(
    ("settings", "samples", "told"),
    [
        ([], 8, None),
        (["data.limits.vision=null"], 1, "rows hold 2,048 tokens in the mean, not data.limits.text=16384"),
        (["data.limits.vision=null", "data.balance=isf"], 2, "rows hold 4,096 tokens in the mean"),
        (["data.limits.text=null"], 1, "rows hold 1,024 image tokens in the mean, not data.limits.vision=16384"),
        (["data.limits.vision=4096"], 4, None),  # both are set: which one ends rows is asked for
        (["data.limits.text=null", "data.limits.vision=null"], 1, None),
        (["data.limits.vision=null", "training.micro_batch_size=8", "training.batch_size=64"], 8, None),
    ],
)
def test_rows_and_what_is_said_of_them(settings: list[str], samples: int, told: str | None) -> None:
    config = asked(*settings)
    lines = unreached(config, LOADS)
    assert len(lines) == (told is not None) and (told or "") in "".join(lines)
    assert samples_a_row(config, 2048, 1024) == samples
    limits = balance_settings(config).limits(LOADS, config.training.micro_batch_size)
    packs = choose_method(config.data.balance, None)(LOADS, limits, 64, config.seed)
    assert np.median(packs.counts) == samples
