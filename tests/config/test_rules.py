"""Degrees against head counts."""

import pytest

from dhp.config.data import DataConfig, LimitsConfig
from dhp.config.model_rules import (
    check_autotp,
    check_cuts,
    check_expert_width,
    check_experts,
    check_stages,
    check_tensor,
    check_tower,
)
from dhp.config.part import PartConfig
from dhp.config.rules import check_balance, check_run
from dhp.config.schema import Config
from dhp.config.training import TrainingConfig
from dhp.core.errors import ConfigError


@pytest.mark.parametrize("ulysses", [1, 2, 4, 8, 16])
def test_ulysses_that_divides_the_heads(ulysses):
    check_tower(16, ulysses, 1)


def test_ulysses_that_does_not():
    with pytest.raises(ConfigError) as caught:
        check_tower(16, 3, 1)
    assert "vision.ulysses=3" in str(caught.value)
    assert "heads(16) % ulysses(3) = 1 != 0" in str(caught.value)
    assert "one of [1, 2, 4, 8, 16]" in str(caught.value)


def test_tower_heads_are_split_by_tensor_first():
    check_tower(16, 4, 4)
    with pytest.raises(ConfigError, match=r"vision.tensor=3 cannot split .* heads\(16\) % tensor\(3\) = 1 != 0"):
        check_tower(16, 1, 3)
    with pytest.raises(ConfigError, match=r"4 attention heads of each tensor actor evenly") as caught:
        check_tower(16, 8, 4)
    assert "vision.ulysses to one of [1, 2, 4]" in str(caught.value) and "vision.ring" in str(caught.value)


@pytest.mark.parametrize(("heads", "kv_heads", "tensor"), [(16, 2, 1), (16, 2, 2), (16, 2, 4), (16, 2, 16), (28, 4, 2)])
def test_tensor_that_splits_or_shares_key_value_heads(heads, kv_heads, tensor):
    check_tensor(heads, kv_heads, tensor)


def test_tensor_that_does_not_divide_the_heads():
    with pytest.raises(ConfigError) as caught:
        check_tensor(28, 4, 8)
    assert "heads(28) % tensor(8) = 4 != 0" in str(caught.value)
    assert "text.tensor to one of [1, 2, 4, 28]" in str(caught.value)


def test_tensor_that_cuts_a_key_value_head():
    with pytest.raises(ConfigError) as caught:
        check_tensor(24, 4, 6)
    assert "kv_heads(4) % tensor(6) = 4 != 0 and tensor(6) % kv_heads(4) = 2 != 0" in str(caught.value)
    assert "one of [1, 2, 4, 8, 12, 24]" in str(caught.value)


@pytest.mark.parametrize(("experts", "data", "expert"), [(0, 3, 1), (8, 4, 2), (8, 4, 4), (60, 6, 3)])
def test_experts_that_are_shared_out_evenly(experts, data, expert):
    check_experts(experts, PartConfig(data=data, expert=expert))


@pytest.mark.parametrize(
    ("experts", "data", "expert", "told"),
    [
        (8, 6, 3, ["8 experts", "experts(8) % expert(3) = 2", "data(6) % expert(3) = 0", "Set text.expert=2,"]),
        (8, 6, 4, ["experts(8) % expert(4) = 0", "data(6) % expert(4) = 2", "Set text.expert=2,"]),
        (60, 12, 8, ["60 experts", "text.data=12", "Set text.expert=6,"]),
        (0, 2, 2, ["text.expert=2: the text decoder has no experts to share out. Set text.expert=1."]),
    ],
)
def test_experts_that_are_not(experts, data, expert, told):
    with pytest.raises(ConfigError) as caught:
        check_experts(experts, PartConfig(data=data, expert=expert))
    assert not [part for part in told if part not in str(caught.value)], caught.value


def test_experts_are_cut_in_equal_widths():
    check_expert_width(24, 4)
    with pytest.raises(
        ConfigError, match=r"width\(24\) % tensor\(16\) = 8 != 0. Set text.tensor to one of \[1, 2, 3, 4"
    ):
        check_expert_width(24, 16)


def test_autotp_wants_whole_key_value_heads():
    check_autotp(4, 2)
    with pytest.raises(ConfigError) as caught:
        check_autotp(2, 4)
    assert "kv_heads(2) % tensor(4) = 2 != 0" in str(caught.value)
    assert "Set text.parallelism=tensor" in str(caught.value) and "one of [1, 2]" in str(caught.value)


@pytest.mark.parametrize(
    ("data", "steps", "message"),
    [
        ({"balance": "isf", "packing": False}, None, "data.balance=isf with data.packing=false"),
        ({"balance": "isf", "balance_window": 64}, 9, "training.save_epochs=2 with data.balance_window=64"),
        ({"isf_passes": 3}, None, "data.isf_passes=3 with data.balance=random: that is for isf"),
        ({"limits": LimitsConfig(rule="paper")}, None, "data.limits.rule=paper with data.balance=random"),
        ({"balance": "balanced", "shuffle": False}, None, "data.balance=balanced with data.shuffle=false"),
        ({"limits": LimitsConfig(vision=9)}, None, "data.limits.vision=9 with data.balance=random"),
        (
            {"balance": "balanced", "limits": LimitsConfig(full_text=9)},
            None,
            "data.limits.full_text=9 with data.balance",
        ),
        (
            {"balance": "isf", "limits": LimitsConfig(vision=8, full_vision=9)},
            None,
            "full_vision=9 > data.limits.vision=8",
        ),
        ({"balance_window": 64}, 9, "data.balance_window=64 with data.balance=random"),
        ({"balance": "isf", "balance_window": 7}, 9, "balance_window(7) < training.batch_size(8)"),
        ({"balance": "isf", "balance_window": 64}, None, "data.balance_window=64 without training.max_steps"),
    ],
)
def test_what_balanced_rows_need(data, steps, message):
    with pytest.raises(ConfigError) as caught:
        check_balance(Config(data=DataConfig(**data), training=TrainingConfig(max_steps=steps, save_epochs=2)))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "data",
    [
        {},
        {"balance": "random", "packing": False},
        {"balance": "isf", "limits": LimitsConfig(text=4096)},
        {"balance": "isf", "limits": LimitsConfig(text=4096, full_text=4096, full_vision=9)},
        {"balance": "balanced", "balance_window": 64},
        {"balance": "isf", "balance_window": 8},  # a step
    ],
)
def test_balanced_rows_that_have_it(data):
    check_balance(Config(data=DataConfig(**data), training=TrainingConfig(max_steps=9)))


@pytest.mark.parametrize(
    ("layers", "pipeline", "virtual", "remedy"),
    [
        (4, 2, 3, "text.virtual_stages to 2 at most, or text.pipeline to 1 at most."),
        (4, 5, 1, "text.pipeline to 4 at most."),
        (4, 2, 2, None),
    ],
)
def test_each_run_of_layers_has_one(layers: int, pipeline: int, virtual: int, remedy: str | None) -> None:
    if remedy is None:
        return check_stages("text", layers, pipeline, virtual)
    with pytest.raises(ConfigError) as caught:
        check_stages("text", layers, pipeline, virtual)
    assert str(caught.value).endswith(f"> layers({layers}). Set {remedy}")


def test_virtual_stages_have_as_many_layers_each():
    with pytest.raises(ConfigError, match=r"layers\(6\) % \(pipeline\(2\) × virtual_stages\(2\) = 4\) = 2 != 0"):
        check_stages("text", 6, 2, 2)
    check_stages("text", 6, 2, 3)
    check_stages("text", 6, 4, 1)  # stages themselves may be uneven


@pytest.mark.parametrize("cuts", [[1], [3], [1, 2], [1, 2, 3]])
def test_cuts_that_leave_each_run_a_layer(cuts):
    check_cuts("text", cuts, 4)


@pytest.mark.parametrize("cuts", [[0], [4], [2, 2], [0, 2], [3, 2], [2, 5]])
def test_cuts_that_leave_a_run_without_layers(cuts):
    with pytest.raises(ConfigError, match="text.cuts=.* cannot cut the 4 layers of text: 0 < .* Give layers"):
        check_cuts("text", cuts, 4)


@pytest.mark.parametrize("schedule", ["vision_ahead", "gpipe", "1f1b", "interleaved"])
def test_stage_3_of_deepspeed_has_one_micro_batch_on_its_way(schedule):
    told = f"text.zero_stage=3 with text.zero_engine=deepspeed and training.schedule={schedule}: with two micro-batches"
    with pytest.raises(ConfigError, match=told):
        check_run(with_stage_3("deepspeed", schedule))
    check_run(with_stage_3("deepspeed", "sequential"))
    check_run(with_stage_3("fsdp", schedule))


def with_stage_3(engine, schedule):
    chunks = 2 if schedule == "interleaved" else 1
    text = PartConfig(pipeline=2, virtual_stages=chunks, zero_stage=3, zero_engine=engine)
    return Config(text=text, vision=PartConfig(pipeline=1), training=TrainingConfig(schedule=schedule))
