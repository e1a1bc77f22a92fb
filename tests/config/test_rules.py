"""What goes together, and the values of each key."""

import math
from typing import Any

import pytest

from dhp.config.command_line import compose_config
from dhp.config.data import DataConfig, DatasetEntry, LimitsConfig
from dhp.config.devices import shipped_directory
from dhp.config.layout import check_mlp_chunks, read_choices, resolve_part, resolve_recompute
from dhp.config.model_rules import (
    check_autotp,
    check_cuts,
    check_expert_width,
    check_experts,
    check_heads,
    check_layers,
    check_layers_of_rows,
    check_mixers,
    check_positions,
    check_stages,
    check_tensor,
    check_tower,
    shares_sequence,
)
from dhp.config.ranges import check_cluster, check_data, check_seed, check_training
from dhp.config.resolve import GROUP, resolve, training_stages
from dhp.config.rules import check_balance, check_budget, check_optimizer, check_run
from dhp.config.schema import ClusterConfig, Config, PartConfig, StageEntry
from dhp.config.training import GroupConfig, TrainingConfig
from dhp.core.errors import ConfigError
from dhp.models.decoder import _rope_types
from tests.config.test_resolve import config


@pytest.mark.parametrize("ulysses", [1, 2, 4, 8, 16])
def test_ulysses_that_divides_the_heads(ulysses):
    check_tower(16, ulysses, 1)


@pytest.mark.parametrize(("heads", "ulysses"), [(16, 3), (16, 6), (9, 2), (9, 5)])
def test_ulysses_that_leaves_some_actors_fewer_heads(heads, ulysses):
    check_tower(heads, ulysses, 1)


def test_ulysses_that_leaves_actors_none():
    told = r"vision.ulysses=7 gives 16 query and 16 key/value heads to 6 actors, 3 .* none to the other 1: set .*=6 and"
    with pytest.raises(ConfigError, match=told):
        check_tower(16, 7, 1)


def test_tower_heads_are_split_by_tensor_first():
    check_tower(16, 4, 4)
    with pytest.raises(ConfigError, match=r"vision.tensor=3 cannot split .* heads\(16\) % tensor\(3\) = 1 != 0"):
        check_tower(16, 1, 3)
    with pytest.raises(ConfigError, match=r"gives 4 query and 4 key/value heads to 4 actors") as caught:
        check_tower(16, 8, 4)
    assert "set vision.ulysses=4" in str(caught.value) and "vision.ring" in str(caught.value)


@pytest.mark.parametrize(("heads", "kv_heads", "tensor"), [(16, 2, 1), (16, 2, 2), (16, 2, 4), (16, 2, 16), (28, 4, 2)])
def test_tensor_that_splits_or_shares_key_value_heads(heads, kv_heads, tensor):
    check_tensor(heads, kv_heads, tensor)


@pytest.mark.parametrize(("heads", "kv_heads", "tensor"), [(28, 4, 8), (24, 4, 6), (9, 3, 2), (9, 3, 4)])
def test_tensor_that_does_not_divide_the_heads(heads, kv_heads, tensor):
    check_tensor(heads, kv_heads, tensor)


def test_tensor_beyond_the_heads():
    with pytest.raises(
        ConfigError, match="text.tensor=10 leaves actors without any .* 9 attention heads: .* 9 at most"
    ):
        check_tensor(9, 3, 10)


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


def asked(ulysses: int = 1, ring: int = 1, tensor: int = 1) -> PartConfig:
    return PartConfig(data=1, ulysses=ulysses, ring=ring, tensor=tensor)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "section"),
    [
        (28, 4, asked(4)),
        (28, 4, asked(7)),
        (28, 4, asked(14)),
        (28, 4, asked(2, tensor=2)),
        (8, 1, asked(8)),
        (9, 3, asked(2)),
        (9, 3, asked(2, tensor=2)),
        (28, 4, asked(10)),
    ],
)
def test_heads_that_are_dealt_out(heads: int, kv_heads: int, section: PartConfig) -> None:
    check_heads(heads, kv_heads, section)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "section", "told"),
    [
        (2, 2, asked(4), r"gives 2 query and 2 key/value heads to 2 actors, 1 .* set text.ulysses=2 and .* text.ring"),
        (28, 4, asked(9), r"text.ulysses=9 gives 28 query and 4 key/value heads to 8 actors, 4 .* text.ulysses=8 and"),
        (
            12,
            4,
            asked(6, tensor=4),
            r"gives 3 query and 1 key/value heads to 3 actors, 1 .* text.ulysses=3 and .* text.ring",
        ),
        (9, 3, asked(5, tensor=2), r"gives 4 query and 4 key/value heads to 4 actors, .* set text.ulysses=2 and"),
    ],
)
def test_heads_that_leave_actors_none(heads: int, kv_heads: int, section: PartConfig, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_heads(heads, kv_heads, section)


def test_a_ring_needs_no_heads() -> None:
    check_heads(3, 1, asked(ring=7))
    assert shares_sequence(asked(ring=2)) and shares_sequence(asked(2)) and not shares_sequence(asked(tensor=4))


def test_positions_that_follow_from_a_rows_length_are_refused() -> None:
    check_positions({"default", "yarn", "llama3"}, scaled=False)
    for kind in ("dynamic", "longrope"):
        with pytest.raises(ConfigError, match=f"rotary positions of the type {kind}, which turn by the longest"):
            check_positions({"default", kind}, scaled=False)
    with pytest.raises(ConfigError, match="attn_temperature_tuning"):
        check_positions({"default"}, scaled=True)
    by_layer = {"full_attention": {"rope_type": "dynamic"}, "sliding_attention": {"rope_type": "default"}}
    assert _rope_types(by_layer) == {"dynamic", "default"} and _rope_types({"rope_type": "yarn"}) == {"yarn"}


@pytest.mark.parametrize(
    ("blocks", "balance", "section", "told"),
    [
        (True, 0.0, asked(2, 2), "see each other both ways.* Set text.ring=1 and text.ulysses higher"),
        (False, 0.01, asked(ring=2), "load-balancing loss .*router_aux_loss_coef=0.01"),
    ],
)
def test_layers_that_need_a_whole_row(blocks: bool, balance: float, section: PartConfig, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_layers_of_rows(blocks, balance, section)


def test_blocks_go_through_ulysses() -> None:
    check_layers_of_rows(True, 0.0, asked(4))


def test_ranks_share_rows_of_layers_with_state_that_are_known() -> None:
    check_mixers([], asked(3))
    with pytest.raises(ConfigError, match=r"carry state along the row \(Other\), of which it is not known"):
        check_mixers(["Other"], asked(2))


def test_chunks_of_mlps() -> None:
    check_mlp_chunks("text", PartConfig(mlp_chunks=8), ("mlp.gate_proj", "mlp.up_proj"))
    check_mlp_chunks("text", PartConfig(compile=True), ("fc1",))
    with pytest.raises(ConfigError, match="text.mlp_chunks=0"):
        check_mlp_chunks("text", PartConfig(mlp_chunks=0), ("mlp.up_proj",))
    with pytest.raises(ConfigError, match="the MLPs of this model's audio part are no modules of their own"):
        check_mlp_chunks("audio", PartConfig(mlp_chunks=2), ("fc1",))


def test_groups_are_for_the_decoder() -> None:
    with pytest.raises(ConfigError, match="text.sequence_groups=all does not exist; choose from auto, one"):
        resolve_part("text", PartConfig(sequence_groups="all"))
    with pytest.raises(ConfigError, match="vision.sequence_groups=one: images and clips are always sharded whole"):
        resolve_part("vision", PartConfig(sequence_groups="one"))


WHOLE = ("training.optimizer=muon", "vision.zero_stage=0")


def config_of(*overrides: str) -> Config:
    return resolve(compose_config("tiny", overrides=list(overrides)))


def test_muon_with_whole_states_and_with_fsdp() -> None:
    config = config_of(*WHOLE, "training.muon_momentum=0.9", "training.muon_adjust_lr=original")
    check_optimizer(config)
    assert (config.training.optimizer, config.vision.zero_engine) == ("muon", "deepspeed")  # which has nothing to do
    cut = config_of(*WHOLE, "text.parallelism=data", "text.zero_stage=3")
    assert cut.text.zero_engine == "fsdp"  # auto
    assert config_of("text.parallelism=data", "text.zero_stage=3").text.zero_engine == "deepspeed"


DATA = ("text.parallelism=data",)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["training.optimizer=moun"], "training.optimizer=moun does not exist; .*did you mean muon?"),
        (["training.optimizer=adamw_torch"], "did you mean adamw?"),
        ([*WHOLE, "training.muon_momentum=1"], "0 <= muon_momentum < 1"),
        ([*WHOLE, "training.muon_adjust_lr=none"], "training.muon_adjust_lr=none does not exist; choose from match"),
        (["training.muon_momentum=0.9"], "training.muon_momentum=0.9 is out of range: training.optimizer=muon, which"),
        (["training.muon_adjust_lr=original"], "training.optimizer=muon, which alone reads it"),
        ([WHOLE[0], "vision.zero_stage=1"], "with vision.zero_stage=1 and vision.zero_engine=deepspeed: .*=fsdp with"),
        ([*WHOLE, *DATA, "text.zero_stage=2", "text.zero_engine=deepspeed"], "with text.zero_stage=2 and text.zero_en"),
        ([*WHOLE, "text.parallelism=deepspeed", "text.zero_stage=2"], "text.parallelism=data in the place of dee"),
        ([*WHOLE, "text.dtype=bfloat16", "text.state_bytes=12"], "training.optimizer=muon with text.state_bytes=12: "),
        ([*WHOLE, "text.host_moments=true"], "training.optimizer=muon with text.host_moments=true: rows"),
        (["training.optimizer=adafactor"], "training.optimizer=adafactor with vision.zero_stage=1 and .*but adafactor"),
        (["training.optimizer=adafactor", WHOLE[1], "training.muon_momentum=0.9"], "muon, which alone reads it"),
        ([*WHOLE, "text.parallelism=autotp"], "with text.parallelism=autotp: .*Set text.parallelism=tensor"),
    ],
)
def test_what_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(*overrides)


LETTERS = {"none": "-", "light": "i", "mlp": "m", "linear": "n", "all": "a"}


@pytest.mark.parametrize(
    ("text", "layers"),
    [
        ("none", "------"),
        ("full", "aaaaaa"),
        ("auto", "aaaaaa"),
        ("0", "a-----"),
        ("0-2,5", "aaa--a"),
        ("light", "iiiiii"),
        ("mlp:1-2", "-mm---"),
        ("mlp:0-1,3,all:4-5", "mm-maa"),
        ("linear, none:5", "nnnnn-"),
        ("light:0-1, 5", "ii---i"),
    ],
)
def test_layers_by_what_they_recompute(text: str, layers: str) -> None:
    assert "".join(LETTERS[choice] for choice in read_choices(text, 6)) == layers


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("most", "most.*none, full, auto"),
        ("ful", "did you mean full"),
        ("1-", "cannot be read"),
        ("mlp:", "cannot be read"),
        ("mlp1", "cannot be read"),
        ("0,,1", "an empty item"),
        ("-3", "cannot be read"),
        ("4-2", "first of a range"),
        ("6", "not among the 6 layers"),
    ],
)
def test_what_cannot_be_read_is_refused(text: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        read_choices(text, 6, "text.recompute")


@pytest.mark.parametrize(
    ("recompute", "checkpointing", "resolved"),
    [(None, False, "none"), (None, True, "full"), ("full", True, "full"), ("mlp:7", False, "mlp:7")],
)
def test_activation_checkpointing_is_another_word_for_full(
    recompute: str | None, checkpointing: bool, resolved: str
) -> None:
    part = PartConfig(recompute=recompute, activation_checkpointing=checkpointing)
    assert resolve_recompute("vision", part) == resolved


@pytest.mark.parametrize("recompute", ["none", "auto", "0-3"])
def test_two_keys_that_contradict_each_other_are_refused(recompute: str) -> None:
    with pytest.raises(ConfigError, match="Keep vision.recompute alone"):
        resolve(config(vision__recompute=recompute, vision__activation_checkpointing=True))


def test_auto_needs_a_budget() -> None:
    with pytest.raises(ConfigError, match="text.recompute=auto without memory.budget_gib"):
        resolve(config(text__recompute="auto", cluster__device="cpu"))
    with pytest.raises(ConfigError, match="memory.budget_gib"):
        resolve(config(text__recompute="auto", memory__budget_gib=0.0))
    check_budget(resolve(config(text__recompute="auto", cluster__device="cpu", memory__budget_gib=0.5)))
    check_budget(resolve(config(text__recompute="auto")))  # of GPUs it is read


def test_layers_that_the_model_does_not_have_are_refused() -> None:
    check_layers("text.recompute", "0-3", 4)
    with pytest.raises(ConfigError, match="text.recompute=0-3: 0-3 is not among the 2 layers; give layers from 0 to 1"):
        check_layers("text.recompute", "0-3", 2)


def test_what_is_resolved_resolves_to_itself() -> None:
    once = resolve(config(vision__activation_checkpointing=True, text__recompute="light"))
    assert resolve(once) == once


RECIPES = shipped_directory() / GROUP


def run_of(**stages: StageEntry) -> Config:
    config = compose_config("tiny", overrides=["run_dir=runs/five"])
    config.stages = dict(stages)
    return config


def test_a_stage_has_its_recipe_then_its_settings() -> None:
    settings: dict[str, Any] = {"training": {"max_steps": 3}, "text": {"num_actors": 1}}
    first, second = training_stages(
        run_of(alignment=StageEntry(settings=settings), far=StageEntry("context_extension", rope_theta=1e6)), RECIPES
    )
    assert (first.number, first.name, first.config.run_dir) == (1, "alignment", "runs/five/1_alignment")
    assert (first.config.training.trainable, first.config.training.max_steps) == (["projector"], 3)
    assert first.config.text.num_actors == 1 and second.config.text.num_actors == 2
    assert second.config.training.learning_rate == 2e-5 and second.config.text.lora.targets[0] == "q_proj"
    assert (second.rope_theta, second.max_positions, second.config.run_dir) == (1e6, None, "runs/five/2_far")
    assert first.config.training.resume == "auto" and not first.config.stages


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES.glob("*.yaml")))
def test_each_recipe_alone_is_a_run(name: str) -> None:
    config = resolve(compose_config("tiny", overrides=[f"+{GROUP}={name}"]))
    (stage,) = training_stages(run_of(**{name: StageEntry()}), RECIPES)
    assert config.training.trainable == stage.config.training.trainable
    assert config.text.lora.rank == (8 if name.startswith("context_") else 0)
    length = name.removeprefix("context_")
    assert config.data.max_tokens == (int(length) if length.isdigit() else None)
    assert not length.isdigit() or config.text.parallelism == ("tensor" if length == "8192" else "sequence")


@pytest.mark.parametrize(
    ("name", "entry", "told"),
    [
        ("a", StageEntry("alignmnt"), "stages.a.recipe=alignmnt does not exist in .*; did you mean alignment?"),
        ("a", StageEntry(settings={"trainin": {}}), "stages.a.settings: trainin is not a key; did you mean training?"),
        ("a", StageEntry(settings={"training": {"max_step": 1}}), "training.max_step is not a key; did you mean"),
        ("a", StageEntry(settings={"run_dir": "x"}), "stages.a.settings.run_dir: the run sets it for all"),
        ("a/b", StageEntry(), "stages.a/b: the name becomes a directory's"),
        ("a", StageEntry(rope_theta=-1.0), "stages.a.rope_theta=-1.0 must be positive"),
    ],
)
def test_what_is_no_stage_is_refused(name: str, entry: StageEntry, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        training_stages(run_of(**{name: entry}), RECIPES)


REGISTRY = {"shapes": DatasetEntry("a.json", "d"), "digits": DatasetEntry("b.json", "d")}


def test_the_defaults_are_in_range():
    check_seed(0)
    check_training(TrainingConfig())
    check_cluster(ClusterConfig())
    check_data(DataConfig(datasets=["shapes"], data_registry=REGISTRY))


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_seed(seed):
    with pytest.raises(ConfigError, match=f"seed={seed} is out of range: 0 <= seed < 4294967296"):
        check_seed(seed)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("batch_size", 0, "training.batch_size >= 1"),
        ("micro_batch_size", -1, "training.micro_batch_size >= 1"),
        ("num_epochs", 0, "training.num_epochs >= 1"),
        ("max_steps", 0, "training.max_steps >= 1"),
        ("log_interval", 0, "training.log_interval >= 1"),
        ("save_steps", 0, "training.save_steps >= 1"),
        ("save_epochs", 0, "training.save_epochs >= 1"),
        ("resume", "", "never, auto, or the path of a checkpoint or run"),
        ("learning_rate", -1e-3, "training.learning_rate >= 0 and finite"),
        ("learning_rate", math.nan, "training.learning_rate=nan"),
        ("eps", math.inf, "training.eps=inf"),
        ("eps", 0, "training.eps=0 is out of range"),
        ("weight_decay", -0.1, "training.weight_decay >= 0 and finite"),
        ("max_grad_norm", -1.0, "training.max_grad_norm >= 0 and finite"),
        ("max_nonfinite_steps", -1, "training.max_nonfinite_steps >= 0"),
        ("betas", [0.9], "training.betas=[0.9]"),
        ("betas", [0.9, 1.0], "0 <= beta < 1"),
        ("warmup_ratio", 1.5, "0 <= warmup_ratio <= 1"),
        ("warmup_steps", -1, "warmup_steps >= 0"),
        ("lr_scheduler_type", "cosin", "; did you mean cosine?"),
        ("logger_project", " ", "a name, or null"),
        ("loggers", ["wandb", "mlflow", "wandb"], "each of them once"),
    ],
)
def test_training(field, value, message):
    with pytest.raises(ConfigError) as caught:
        check_training(TrainingConfig(**{field: value}))
    assert message in str(caught.value)
    assert f"training.{field}={value}" in str(caught.value)


def test_a_logger_that_there_is_not():
    with pytest.raises(ConfigError, match="training.loggers=wandbb does not exist; .* did you mean wandb"):
        check_training(TrainingConfig(loggers=["mlflow", "wandbb"]))


def test_a_groups_name_that_two_groups_could_have_together():
    with pytest.raises(ConfigError, match=r"training\.groups=a\+b is out of range: a name without \+"):
        check_training(TrainingConfig(groups={"a+b": GroupConfig(["norm"])}))


def test_a_warmup_beyond_max_steps():
    with pytest.raises(ConfigError, match=r"warmup_steps\(9\) > max_steps\(8\)"):
        check_training(TrainingConfig(warmup_steps=9, max_steps=8))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"datasets": []}, "data.datasets=[] names no dataset"),
        ({"datasets": ["shpes"]}, "shpes is not in data.data_registry, which has shapes, digits"),
        ({"datasets": ["shpes"]}, "did you mean shapes?"),
        ({"datasets": ["shpes%50"]}, "shpes is not in data.data_registry, which has shapes, digits"),
        ({"datasets": ["shapes%0"]}, "0 < percent <= 100"),
        ({"datasets": ["a"], "data_registry": {"a": DatasetEntry("x", format="lava")}}, "did you mean llava?"),
        ({"datasets": ["a"], "data_registry": {"a": DatasetEntry("x", weight=0)}}, "registry.a.weight=0.0 is out of"),
        (
            {"datasets": ["a"], "data_registry": {"a": DatasetEntry("x", columns={"imags": "photos"})}},
            "data.data_registry.a.columns.imags=photos: imags is no name that a format knows; on the left "
            "stands one of messages, conversations,",
        ),
        (
            {"datasets": ["a"], "data_registry": {"a": DatasetEntry("x", columns={"imags": "photos"})}},
            "on the right the file's own; did you mean images?",
        ),
        ({"video_fps": 0.0}, "data.video_fps > 0 and finite"),
        ({"video_max_frames": 1}, "video_max_frames >= 2"),
        ({"max_tokens": 0}, "data.max_tokens >= 1"),
        (
            {"datasets": ["a"], "data_registry": {"a": DatasetEntry("", "d")}},
            "data.data_registry.a.annotation_path is not set",
        ),
        ({"on_bad_sample": "ignore"}, "data.on_bad_sample=ignore does not exist; choose from error, skip"),
        ({"num_workers": -1}, "num_workers >= 0"),
        ({"prefetch": -1}, "prefetch >= 0"),
        ({"balance": "balance"}, "did you mean balanced?"),
        ({"balance_window": 0}, "data.balance_window >= 1"),
        ({"limits": LimitsConfig(text=0)}, "data.limits.text >= 1"),
        ({"min_pixels": 0}, "data.min_pixels >= 1"),
        ({"cache_features": "f", "cache_features_gib": 0.0}, "data.cache_features_gib > 0"),
        ({"cache_features_gib": 2.0}, "it bounds data.cache_features, which is not set"),
        ({"min_pixels": 100, "max_pixels": 50}, "min_pixels(100) > max_pixels(50)"),
    ],
)
def test_data(changes, message):
    with pytest.raises(ConfigError) as caught:
        check_data(DataConfig(**({"datasets": ["shapes"], "data_registry": REGISTRY} | changes)))
    assert message in str(caught.value)


@pytest.mark.parametrize("address", ["local", "auto", "ray://10.0.0.1:10001", "node-1:6379", "[::1]:6379"])
def test_addresses(address):
    check_cluster(ClusterConfig(address=address))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"address": "somewhere"}, "cluster.address=somewhere is not an address"),
        ({"transport": "mpi"}, "cluster.transport=mpi does not exist; choose from auto, shared_memory"),
        ({"device": "gpu"}, "cluster.device=gpu does not exist; choose from auto, cpu, cuda"),
        ({"start_timeout_s": 0.0}, "cluster.start_timeout_s > 0"),
        ({"collective_timeout_s": 0.0}, "cluster.collective_timeout_s > 0"),
        (
            {"collective_timeout_s": 61.0, "step_timeout_s": 60.0},
            r"cluster.collective_timeout_s=61 > cluster.step_timeout_s=60: a step without progress would end",
        ),
        ({"threads_per_actor": 0}, "cluster.threads_per_actor >= 1"),
    ],
)
def test_cluster(changes, message):
    with pytest.raises(ConfigError) as caught:
        check_cluster(ClusterConfig(**changes))
    assert message in str(caught.value)


@pytest.mark.parametrize("given", ["7", "[7]", "[9,7]", "[0,7]", "[1,true]", "some"])
def test_a_trace_is_of_all_steps_or_of_two_in_order(given: str) -> None:
    with pytest.raises(ConfigError, match=r"training.trace.*two steps as \[500, 510\]"):
        check_training(compose_config("tiny", None, [f"training.trace={given}"]).training)
    for right in ("true", "false", "[7,7]"):
        check_training(compose_config("tiny", None, [f"training.trace={right}"]).training)
