"""What a configuration trains of a model: rules, refusals, and the table that tells it."""

from __future__ import annotations

import pytest

from dhp.config.command_line import compose_config
from dhp.config.resolve import resolve
from dhp.config.schema import Config
from dhp.config.training import GroupConfig, TrainingConfig
from dhp.core.errors import ConfigError
from dhp.core.graph import Tie
from dhp.core.parameters import TrainingRules
from dhp.models.empty import list_parameters
from dhp.models.registry import load_family
from dhp.plan.run_plan import plan_run
from dhp.plan.trainable import check_frozen_states, check_rules, part_names, training_rules
from dhp.trainer.settings import table_of_training

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
