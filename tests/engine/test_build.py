"""The optimizer is the one that was configured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from dhp.config.command_line import compose_config
from dhp.config.resolve import resolve
from dhp.core.parameters import ALL, AdapterSettings, GroupRule, ParameterGroup, Selector, TrainingRules
from dhp.engine.build import cuts_first, dtype_to_load, freeze, optimizer_maker, rates_at, trained_groups
from dhp.engine.stage_settings import OptimizerSettings, StageSettings
from dhp.models.empty import stored_dtype
from dhp.trainer.settings import stage_settings
from tests.helpers.graphs import make_graph
from tests.helpers.layouts import with_part

UPDATE = OptimizerSettings(
    learning_rate=0.02,
    betas=(0.7, 0.95),
    eps=1e-3,
    weight_decay=0.3,
    lr_scheduler_type="constant",
    warmup_steps=0,
    total_steps=10,
    max_grad_norm=None,
)


def settings(rules: TrainingRules = ALL) -> StageSettings:
    config = resolve(compose_config("tiny"))
    graph = make_graph()
    return replace(stage_settings(config, graph, graph.stage("text"), "cpu", 10), update=UPDATE, rules=rules)


def test_adamw_has_every_configured_value() -> None:
    optimizer = optimizer_maker(settings())([("weight", torch.nn.Parameter(torch.zeros(1)))])
    found = {name: optimizer.param_groups[0][name] for name in ("lr", "betas", "eps", "weight_decay")}
    assert optimizer.param_groups[0]["group"].name == "text"
    assert found == {"lr": 0.02, "betas": (0.7, 0.95), "eps": 1e-3, "weight_decay": 0.3}


def test_adamw_has_a_group_for_each_of_the_rules() -> None:
    own = (GroupRule("slow", (Selector("a"),), learning_rate=0.01), GroupRule("light", (Selector("bias"),), None, 0.0))
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(1, 1), "b": torch.nn.Linear(1, 1)})
    made = optimizer_maker(settings(TrainingRules(groups=own)))(model.named_parameters())
    found = {group["group"].name: (group["lr"], group["weight_decay"], group["params"]) for group in made.param_groups}
    assert found == {
        "slow": (0.01, 0.3, [model["a"].weight]),
        "slow+light": (0.01, 0.0, [model["a"].bias]),
        "text": (0.02, 0.3, [model["b"].weight]),
        "light": (0.02, 0.0, [model["b"].bias]),
    }


def test_what_no_rule_trains_has_no_gradient_and_what_was_frozen_stays_so() -> None:
    model = torch.nn.ModuleDict({name: torch.nn.Linear(1, 1) for name in "abc"})
    model["a"].requires_grad_(False)
    freeze(model, lambda name: name != "b.weight")
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == [
        "b.bias",
        "c.weight",
        "c.bias",
    ]
    assert trained_groups(model, settings()) == (ParameterGroup("text", 0.02, 0.3, 0),)


def test_groups_fall_to_the_same_share_of_their_rates() -> None:
    groups = [ParameterGroup("text", 0.02, 0.3, 0), ParameterGroup("fast", 0.2, 0.3, 0)]
    update = replace(settings().update, learning_rate=0.02, lr_scheduler_type="linear", total_steps=4, min_lr=0.005)
    assert rates_at(2, groups, update) == pytest.approx(dict(zip(groups, (0.0125, 0.125))))
    assert rates_at(4, groups, update) == pytest.approx(dict(zip(groups, (0.005, 0.05))))
    waves = replace(update, lr_scheduler_type="cosine_with_restarts", cycles=2, min_lr=0.0)
    assert [rates_at(step, groups, waves)[groups[0]] for step in (0, 2)] == [0.02, 0.02]


def test_what_is_configured_reaches_every_stage() -> None:
    """None of the values is a default, and no two are alike."""
    values = {
        "learning_rate": 0.002,
        "betas": [0.7, 0.95],
        "eps": 1e-3,
        "weight_decay": 0.3,
        "max_grad_norm": 0.25,
        "lr_scheduler_type": "warmup_stable_decay",
        "warmup_steps": 3,
        "min_lr": 1e-4,
        "lr_decay_ratio": 0.2,
        "lr_decay_type": "linear",
    }
    config = resolve(compose_config("tiny", overrides=[f"training.{name}={value}" for name, value in values.items()]))
    expected = OptimizerSettings(
        *(0.002, (0.7, 0.95), 1e-3, 0.3, "warmup_stable_decay", 3, 40, 0.25, 1e-4), decay_steps=8, decay_type="linear"
    )
    graph = make_graph()
    for stage in graph.stages:
        settings = stage_settings(config, graph, stage, "cpu", 40)
        assert settings.spec == stage and settings.update == expected


@pytest.mark.parametrize(
    ("stored", "computed", "adapted", "loaded"),
    [
        (torch.bfloat16, torch.bfloat16, False, torch.bfloat16),  # the pages of the file itself
        (torch.bfloat16, torch.bfloat16, True, torch.float32),
        (torch.float32, torch.bfloat16, False, torch.float32),  # which has more than the stage computes in
        (torch.bfloat16, torch.float32, False, torch.float32),
        (torch.float16, torch.bfloat16, False, torch.float32),
    ],
    ids=str,
)
def test_weights_are_read_as_they_are_stored(
    stored: torch.dtype, computed: torch.dtype, adapted: bool, loaded: torch.dtype, tmp_path: Path
) -> None:
    save_file(
        {"a": torch.zeros(2, dtype=stored), "counts": torch.zeros(2, dtype=torch.int64)}, tmp_path / "a.safetensors"
    )
    adapters = AdapterSettings(2, 2.0) if adapted else None
    given = replace(with_part(settings(), model_name=str(tmp_path)), adapters=adapters)
    assert dtype_to_load(given, computed) is loaded


def test_of_several_formats_none_is_the_stored_one(tmp_path: Path) -> None:
    for name, dtype in (("a", torch.bfloat16), ("b", torch.float32)):
        save_file({name: torch.zeros(2, dtype=dtype)}, tmp_path / f"{name}.safetensors")
    assert stored_dtype(str(tmp_path)) is None
    assert dtype_to_load(with_part(settings(), model_name=str(tmp_path)), torch.bfloat16) is torch.float32


def test_of_a_hub_id_nothing_is_stored_here() -> None:
    assert stored_dtype("Qwen/Qwen2.5-VL-3B-Instruct") is None
    assert (
        dtype_to_load(with_part(settings(), model_name="Qwen/Qwen2.5-VL-3B-Instruct"), torch.bfloat16) is torch.float32
    )


def test_only_fsdp2_cuts_first() -> None:
    cut = {
        (stage, engine): cuts_first(with_part(settings(), zero_stage=stage, zero_engine=engine))
        for stage, engine in ((0, "fsdp"), (2, "fsdp"), (3, "fsdp"), (3, "deepspeed"))
    }
    assert cut == {(0, "fsdp"): False, (2, "fsdp"): True, (3, "fsdp"): True, (3, "deepspeed"): False}
