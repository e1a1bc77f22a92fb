"""From the written configuration to the one that runs: filled values, and every rule with its message."""

from copy import deepcopy

import pytest

from dhp.config.command_line import compose_config
from dhp.config.data import DataConfig, DatasetEntry
from dhp.config.keys import find_key
from dhp.config.parts import parts
from dhp.config.resolve import check_model_dir, collective_timeout_s, micro_batches, resolve, warmup_steps
from dhp.config.schema import ClusterConfig, Config, LoraConfig, PartConfig
from dhp.config.training import GroupConfig
from dhp.core.errors import ConfigError

FOUR_BITS = LoraConfig(rank=4, quantization="nf4")


def config(**changes: object) -> Config:
    """A configuration that runs, with `vision__ring=2` style changes."""
    base = Config(
        run_dir="runs/x",
        text=PartConfig(model_name="m"),
        data=DataConfig(datasets=["shapes"], data_registry={"shapes": DatasetEntry("a.json", "d")}),
    )
    for path, value in changes.items():
        *sections, field = path.split("__")
        owner = base
        for section in sections:
            owner = getattr(owner, section)
        setattr(owner, field, value)
    return base


def degrees(part: PartConfig) -> tuple[int | None, ...]:
    return part.data, part.ulysses, part.ring, part.tensor


@pytest.mark.parametrize(
    ("part", "parallelism", "num_actors", "given", "expected"),
    [
        ("vision", "none", 1, {}, (1, 1, 1, 1)),
        ("vision", "data", 4, {}, (4, 1, 1, 1)),
        ("vision", "sequence", 2, {}, (1, 2, 1, 1)),
        ("vision", "sequence", 6, {"data": 3}, (3, 2, 1, 1)),
        ("vision", "data", 6, {"ulysses": 2}, (3, 2, 1, 1)),
        ("vision", "sequence", 8, {"ring": 2}, (1, 4, 2, 1)),
        ("vision", "sequence", 4, {"ring": 4}, (1, 1, 4, 1)),
        ("vision", "tensor", 8, {"data": 2, "ulysses": 2}, (2, 2, 1, 2)),
        ("vision", "sequence", 4, {"data": 2, "ulysses": 2, "ring": 1, "tensor": 1}, (2, 2, 1, 1)),
        ("text", "tensor", 2, {}, (1, 1, 1, 2)),
        ("text", "tensor", 4, {"data": 2}, (2, 1, 1, 2)),
        ("text", "data", 4, {"tensor": 2}, (2, 1, 1, 2)),
        ("vision", "deepspeed", 4, {"zero_stage": 3}, (4, 1, 1, 1)),
        ("vision", "deepspeed", 4, {"zero_stage": 1, "ulysses": 2}, (2, 2, 1, 1)),
        ("text", "deepspeed", 2, {"zero_stage": 2}, (2, 1, 1, 1)),
        ("text", "autotp", 4, {"data": 2}, (2, 1, 1, 2)),
    ],
)
def test_unset_degrees_are_filled(part, parallelism, num_actors, given, expected):
    given = {"parallelism": parallelism, "num_actors": num_actors} | given
    resolved = resolve(config(**{f"{part}__{field}": value for field, value in given.items()}))
    assert degrees(getattr(resolved, part)) == expected


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        (
            {"vision__parallelism": "sequence", "vision__num_actors": 2, "vision__ulysses": 3},
            ["vision: data(1) × ulysses(3) × ring(1) × tensor(1) = 3 != num_actors(2)", "Set vision.num_actors=3"],
        ),
        (
            {"text__parallelism": "tensor", "text__num_actors": 3, "text__data": 2},
            ["text.num_actors=3", "text.tensor", "data(2) × ulysses(1) × ring(1) = 2 does not divide num_actors(3)"],
        ),
        (
            {"vision__num_actors": 2},
            ["vision.num_actors=2", "none means num_actors = 1", "vision.parallelism=sequence"],
        ),
        ({"vision__data": 2}, ["data(2) × ulysses(1) × ring(1) × tensor(1) = 2 != num_actors(1)"]),
        (
            {"text__parallelism": "sequence", "text__num_actors": 2, "text__expert": 2},
            ["text.expert=2 with text.ulysses=2 and text.ring=1", "Set text.expert=1"],
        ),
        (
            {"vision__parallelism": "tensor", "vision__num_actors": 2, "vision__zero_stage": 1},
            ["vision.zero_stage=1 with vision.zero_engine=auto and vision.tensor=2", "Set vision.zero_stage=2"],
        ),
        (
            {"text__parallelism": "autotp", "text__num_actors": 2, "text__ring": 2, "text__tensor": 1},
            ["text.parallelism=autotp with text.ulysses=1 and text.ring=2", "Set text.parallelism=tensor or sequence"],
        ),
        ({"vision__parallelism": "tensr"}, ["vision.parallelism=tensr", "did you mean tensor?"]),
        (
            {"text__parallelism": "sequnce"},
            ["text.parallelism=sequnce", "did you mean sequence?"],
        ),
        ({"vision__parallelism": "sequnce"}, ["did you mean sequence?"]),
        ({"text__num_actors": 0}, ["text.num_actors=0", "text.num_actors >= 1"]),
        ({"text__tensor": -2}, ["text.tensor=-2", "text.tensor >= 1"]),
        ({"text__zero_stage": 4}, ["text.zero_stage=4 does not exist; choose from 0, 1, 2, 3"]),
        (
            {"vision__parallelism": "deepspeed"},
            ["vision.parallelism=deepspeed with vision.zero_stage=0", "Set vision.zero_stage=1", "2", "3"],
        ),
        (
            {
                "text__parallelism": "tensor",
                "text__num_actors": 2,
                "text__zero_stage": 2,
                "text__zero_engine": "deepspeed",
            },
            ["text.zero_engine=deepspeed with text.zero_stage=2 and text.tensor=2", "Set text.zero_engine=fsdp"],
        ),
        ({"text__expert": 0}, ["text.expert=0 is out of range"]),
        ({"vision__expert": 2}, ["vision.expert=2 does not exist: vision has no experts", "Set vision.expert=1"]),
        (
            {"text__parallelism": "data", "text__num_actors": 4, "text__tensor": 2, "text__expert": 2},
            ["text.expert=2 with text.tensor=2", "not both", "Set text.tensor=1, or text.expert=1"],
        ),
        (
            {"text__parallelism": "data", "text__num_actors": 2, "text__zero_stage": 2, "text__expert": 2},
            ["text.expert=2 with text.zero_stage=2", "Set text.zero_stage=0, or text.expert=1"],
        ),
        (
            {"text__parallelism": "autotp", "text__num_actors": 2, "text__zero_stage": 2},
            ["text.zero_stage=2 with text.parallelism=autotp", "Set text.parallelism=tensor"],
        ),
        (
            {"text__parallelism": "data", "text__num_actors": 2, "text__zero_stage": 1, "text__zero_engine": "fsdp"},
            ["text.zero_stage=1 with text.zero_engine=fsdp and text.tensor=1", "or text.zero_engine=deepspeed"],
        ),
        (
            {
                "text__parallelism": "deepspeed",
                "text__num_actors": 2,
                "text__zero_stage": 2,
                "text__zero_engine": "fsdp",
            },
            [
                "text.zero_engine=fsdp, and text.parallelism=deepspeed asks for DeepSpeed's",
                "Set text.parallelism=data, or text.zero_engine=auto",
            ],
        ),
        (
            {"text__parallelism": "deepspeed", "text__num_actors": 8, "text__tensor": 8, "text__zero_stage": 2},
            ["text.tensor=8 makes FSDP2 the engine of ZeRO", "Set text.parallelism=data, or text.tensor=1."],
        ),
        (
            {"text__state_bytes": 14},
            [
                "text.state_bytes=14 does not exist; choose from 18, 16, 12, 10",
                "weight(2) + compensation(2) + sum(4) + exp_avg(2) + exp_avg_sq(2) = 12",
            ],
        ),
        (
            {"vision__state_bytes": 12},
            ["vision.state_bytes=12 with vision.dtype=float32", "in float32,", "Set vision.dtype=bfloat16"],
        ),
        (
            {
                **{"text__parallelism": "data", "text__num_actors": 2, "text__zero_stage": 3},
                **{"text__dtype": "bfloat16", "text__state_bytes": 10},
            },
            [
                "text.state_bytes=10 with text.zero_engine=deepspeed and text.zero_stage=3",
                "weight(2) + master(4) + sum(4) + exp_avg(4) + exp_avg_sq(4) = 18 bytes a parameter",
                "Set text.zero_engine=fsdp with text.zero_stage=2 or 3",
                "text.zero_stage=0, or text.state_bytes=18",
            ],
        ),
        (
            {"text__parallelism": "data", "text__num_actors": 2, "text__zero_stage": 2, "text__host_moments": True},
            [
                "text.host_moments=true with text.zero_engine=deepspeed and text.zero_stage=2",
                "Set text.zero_engine=fsdp with text.zero_stage=2 or 3",
            ],
        ),
        (
            {"text__parallelism": "data", "text__sequence_sharded_norms": True},
            ["text.sequence_sharded_norms=true with text.tensor=1", "Set text.tensor=2 or more"],
        ),
        (
            {"text__parallelism": "autotp", "text__num_actors": 2, "text__sequence_sharded_norms": True},
            ["text.sequence_sharded_norms=true with text.parallelism=autotp", "Set text.parallelism=tensor"],
        ),
        (
            {"vision__host_moments": True, "vision__dtype": "float64"},
            ["vision.host_moments=true with vision.dtype=float64", "Set vision.dtype=float32"],
        ),
        ({"text__zero_engine": "torch"}, ["text.zero_engine=torch does not exist; choose from auto, deepspeed, fsdp"]),
        (
            {"vision__zero_stage": 2, "vision__zero_engine": "deepspeed", "vision__dtype": "float64"},
            ["vision.zero_stage=2 with vision.dtype=float64", "Set vision.zero_engine=fsdp"],
        ),
        (
            {"text__zero_stage": 3, "training__schedule": "vision_ahead"},
            [
                "text.zero_stage=3 with text.zero_engine=deepspeed and training.schedule=vision_ahead",
                "text.zero_engine=fsdp",
            ],
        ),
        (
            {"vision__zero_stage": 3, "training__schedule": "vision_ahead"},
            ["vision.zero_engine=deepspeed and training.schedule=vision_ahead", "vision.zero_stage=2"],
        ),
        (
            {"vision__zero_stage": 1, "vision__dtype": "float64"},
            ["vision.zero_stage=1 with vision.dtype=float64", "DeepSpeed", "vision.dtype=float32"],
        ),
        (
            {"audio__num_actors": 2, "audio__ring": 2, "audio__parallelism": "sequence"},
            ["audio.ring=2 does not exist yet", "audio has pipeline, data, ulysses"],
        ),
        (
            {"audio__num_actors": 2, "audio__parallelism": "pipeline", "audio__zero_stage": 3},
            ["audio.pipeline=2 with audio.zero_stage=3", "DeepSpeed gathers", "audio.zero_engine=fsdp"],
        ),
        (
            {"vision__num_actors": 2, "vision__parallelism": "pipeline", "vision__zero_stage": 3},
            ["vision.pipeline=2 with vision.zero_stage=3", "DeepSpeed gathers", "vision.zero_engine=fsdp"],
        ),
        (
            {"vision__num_actors": 2, "vision__parallelism": "pipeline", "vision__virtual_stages": 2},
            ["vision.virtual_stages=2", "text.virtual_stages interleaves the decoder's"],
        ),
        (
            {"vision__num_actors": 2, "vision__parallelism": "pipeline", "data__cache_features": "/tmp/kept"},
            ["vision.pipeline=2 with data.cache_features=/tmp/kept", "Set vision.pipeline=1"],
        ),
        (
            {"cluster__chain": True, "cluster__collocate": False},
            ["cluster.chain=true with cluster.collocate=false", "cluster.chain=false"],
        ),
        (
            {"cluster__chain": True, "text__num_actors": 2, "text__parallelism": "tensor"},
            ["vision.num_actors / vision.pipeline = text.num_actors / text.pipeline", "cluster.chain=true with"],
        ),
        (
            {"text__parallelism": "tensor", "text__num_actors": 4, "text__pipeline": 3},
            ["pipeline(3) × data(1) × ulysses(1) × ring(1) = 3 does not divide num_actors(4)"],
        ),
        (
            {"text__parallelism": "none", "text__num_actors": 3, "text__pipeline": 3},
            ["none means num_actors = 1. Set text.parallelism=pipeline for text.pipeline=3."],
        ),
        ({"text__virtual_stages": 2}, ["text.virtual_stages=2 with text.pipeline=1", "Set text.pipeline to 2 or more"]),
        (
            {"text__parallelism": "pipeline", "text__num_actors": 2, "text__cuts": [1, 2]},
            ["text.cuts=[1, 2] has 2 layers", "pipeline(2) × virtual_stages(1) - 1 = 1"],
        ),
        (
            {
                "text__parallelism": "pipeline",
                "text__num_actors": 2,
                "text__virtual_stages": 2,
                "training__schedule": "gpipe",
            },
            ["text.virtual_stages=2 with training.schedule=gpipe", "Set training.schedule=interleaved"],
        ),
        (
            {"text__parallelism": "pipeline", "text__num_actors": 2, "training__schedule": "interleaved"},
            ["training.schedule=interleaved with text.virtual_stages=1", "training.schedule=1f1b"],
        ),
        ({"training__schedule": "pipedream"}, ["did you mean 1f1b?"]),
        (
            {"text__parallelism": "autotp", "text__num_actors": 4, "text__pipeline": 2},
            ["text.pipeline=2 with text.parallelism=autotp", "Set text.parallelism=tensor or pipeline"],
        ),
        (
            {"training__groups": {"slow": GroupConfig(learning_rate=-1.0)}},
            ["training.groups.slow.learning_rate=-1.0 is out of range"],
        ),
        (
            {"training__groups": {"slow": GroupConfig(warmup_steps=9)}, "training__max_steps": 8},
            ["training.groups.slow.warmup_steps=9", "lower training.groups.slow.warmup_steps"],
        ),
        ({"text__lora": LoraConfig(rank=-1)}, ["text.lora.rank=-1 is out of range"]),
        ({"text__lora": LoraConfig(alpha=8.0)}, ["text.lora has settings, but text.lora.rank=0", "Set text.lora.rank"]),
        ({"text__lora": LoraConfig(rank=4, alpha=0.0)}, ["text.lora.alpha=0.0 is out of range"]),
        ({"text__lora": LoraConfig(rank=4, dropout=1.0)}, ["text.lora.dropout=1.0 is out of range"]),
        (
            {"text__lora": LoraConfig(rank=4), "text__parallelism": "autotp", "text__num_actors": 2},
            ["text.lora.rank=4 with text.parallelism=autotp", "Set text.parallelism=tensor"],
        ),
        (
            {"text__lora": LoraConfig(rank=4, dora=True), "text__parallelism": "tensor", "text__num_actors": 2},
            ["text.lora.dora=true with text.tensor=2", "or text.lora.dora=false"],
        ),
        ({"text__lora": LoraConfig(quantization="nf4")}, ["text.lora has settings, but text.lora.rank=0"]),
        (
            {"text__lora": LoraConfig(rank=4, quantization="nf3")},
            ["text.lora.quantization=nf3 does not exist; choose from nf4"],
        ),
        (
            {"text__lora": FOUR_BITS},
            ["text.lora.quantization=nf4 with cluster.device=auto", "made for GPUs", "Set cluster.device=cuda"],
        ),
        (
            {"vision__lora": FOUR_BITS, "cluster__device": "cpu"},
            ["vision.lora.quantization=nf4 with cluster.device=cpu", "leave vision.lora.quantization out"],
        ),
        (
            {"text__lora": FOUR_BITS, "text__parallelism": "tensor", "text__num_actors": 2},
            ["text.lora.quantization=nf4 with text.tensor=2: bitsandbytes rounds", "Set text.tensor=1"],
        ),
        (
            {"text__lora": FOUR_BITS, "text__parallelism": "data", "text__num_actors": 2, "text__expert": 2},
            ["text.lora.quantization=nf4 with text.expert=2", "Set text.expert=1"],
        ),
        (
            {"text__lora": FOUR_BITS, "text__parallelism": "data", "text__num_actors": 2, "text__zero_stage": 1},
            ["text.lora.quantization=nf4 with text.zero_stage=1: ZeRO copies", "Set text.zero_stage=0"],
        ),
        ({"vision__lora": FOUR_BITS, "vision__dtype": "float64"}, ["with vision.dtype=float64", "=bfloat16, or leave"]),
        ({"text__lora": FOUR_BITS, "text__compile": True}, ["with text.compile=true", "Set text.compile=false"]),
        (
            {"text__lora": FOUR_BITS, "text__recompute": "mlp"},
            ["with text.recompute=mlp: what a layer keeps", "Set text.recompute=none or full"],
        ),
        (
            {"text__lora": LoraConfig(rank=4, quantization="nf4", dora=True)},
            ["text.lora.quantization=nf4 with text.lora.dora=true", "Set text.lora.dora=false"],
        ),
        (
            {"text__lora": FOUR_BITS, "cluster__device": "cuda", "memory__accounting": True},
            ["text.lora.quantization=nf4 with memory.accounting=true", "Leave text.lora.quantization out"],
        ),
        ({"data__eval_datasets": ["shape"]}, ["shape is not in data.data_registry", "did you mean shapes?"]),
        ({"data__eval_datasets": ["shapes", "shapes%50"]}, ["names a dataset twice"]),
        ({"training__eval_steps": 5}, ["training.eval_steps=5, but data.eval_datasets is empty"]),
        (
            {"data__eval_datasets": ["shapes"], "training__best_metric": "eval_los"},
            ["training.best_metric=eval_los does not exist", "eval_loss, eval_loss/shapes; did you mean eval_loss?"],
        ),
        ({"training__save_total_limit": 0}, ["training.save_total_limit=0 is out of range"]),
        ({"vision__parallelism": "ulysses"}, ["vision.parallelism=ulysses does not exist", "did you mean sequence?"]),
        ({"vision__parallelism": "TP"}, ["did you mean tensor?"]),
        ({"text__parallelism": "zero"}, ["did you mean deepspeed?"]),
        ({"text__dtype": "bf16"}, ["text.dtype=bf16 does not exist", "Set text.dtype=bfloat16"]),
        (
            {"text__attention_backend": "flash_attention_2"},
            ["text.attention_backend=flash_attention_2 with text.dtype=float32", "Set text.dtype=bfloat16"],
        ),
        (
            {
                "vision__attention_backend": "flash_attention_2",
                "vision__dtype": "bfloat16",
                "cluster__device": "cpu",
            },
            ["vision.attention_backend=flash_attention_2 with cluster.device=cpu", "or cluster.device=cuda"],
        ),
        (
            {"text__compile": True, "text__recompute": "light"},
            ["text.compile=true with text.recompute=light", "Set text.recompute=none, or text.compile=false"],
        ),
        (
            {"text__compile": True, "vision__recompute": "auto", "memory__budget_gib": 1.0},
            ["text.compile=true with vision.recompute=auto", "Set text.compile=false"],
        ),
        ({"vision__compile": True, "memory__accounting": True}, ["vision.compile=true with memory.accounting=true"]),
        (
            {"text__compile": True, "text__parallelism": "tensor", "text__num_actors": 2},
            ["text.compile=true with text.tensor=2", "collectives between the slices", "Set text.tensor=1"],
        ),
        (
            {"text__compile": True, "text__zero_stage": 2},
            ["text.compile=true with text.zero_stage=2", "Set text.zero_stage=0"],
        ),
        (
            {"text__compile": True, "text__expert": 2, "text__parallelism": "data", "text__num_actors": 2},
            ["text.compile=true with text.expert=2", "Set text.expert=1"],
        ),
        ({"text__dtype": "float31"}, ["text.dtype=float31 does not exist", "did you mean float32?"]),
        ({"vision__attention_backend": "sdp"}, ["vision.attention_backend=sdp", "did you mean sdpa?"]),
        ({"vision__model_name": "other"}, ["vision.model_name=other != text.model_name=m", "one checkpoint"]),
        ({"text__model_name": ""}, ["vision.model_name and text.model_name are not set"]),
        (
            {"training__batch_size": 10, "training__micro_batch_size": 4},
            [
                "training.batch_size=10",
                "batch_size(10) % (text.data(1) × micro_batch_size(4) = 4) = 2 != 0",
                "Set training.batch_size=8 or 12, or training.micro_batch_size=2.",
            ],
        ),
        (
            {"training__batch_size": 2, "training__micro_batch_size": 4},
            ["Set training.batch_size=4, or training.micro_batch_size=2."],
        ),
        (
            {"training__batch_size": 9, "text__parallelism": "data", "text__num_actors": 2},
            ["batch_size(9) % (text.data(2) × micro_batch_size(1) = 2) = 1", "Set training.batch_size=8 or 10."],
        ),
    ],
)
def test_a_broken_rule_is_told_with_its_equation_and_remedy(changes, messages):
    with pytest.raises(ConfigError) as caught:
        resolve(config(**changes))
    for message in messages:
        assert message in str(caught.value)


def test_one_model_name_serves_both_parts():
    resolved = resolve(config(text__model_name="", vision__model_name="~/m"))
    assert resolved.vision.model_name == resolved.text.model_name
    assert resolved.text.model_name.endswith("/m") and "~" not in resolved.text.model_name


def test_defaults_that_depend_on_other_values():
    resolved = resolve(config(training__max_grad_norm=0.0))
    assert resolved.training.checkpoint_dir == "runs/x/checkpoints"
    assert resolved.training.max_grad_norm is None
    assert resolve(config(training__checkpoint_dir="/c")).training.checkpoint_dir == "/c"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_every_zero_stage_of_both_parts(stage, dtype):
    part = {"parallelism": "deepspeed", "num_actors": 2, "zero_stage": stage, "dtype": dtype}
    changes = {f"{name}__{field}": value for name in ("vision", "text") for field, value in part.items()}
    resolved = resolve(config(training__batch_size=8, **changes))
    assert (resolved.vision.data, resolved.text.data, resolved.text.zero_stage) == (2, 2, stage)
    if stage < 3:
        resolve(config(training__schedule="vision_ahead", **changes))


def test_the_given_config_stays_as_it_was():
    given = config(vision__parallelism="sequence", vision__num_actors=2, training__max_grad_norm=0.0)
    before = deepcopy(given)
    resolve(given)
    assert given == before


def test_resolving_twice_changes_nothing():
    once = resolve(config(text__parallelism="tensor", text__num_actors=4, text__data=2))
    assert resolve(once) == once


def test_micro_batches():
    changes = {"text__parallelism": "data", "text__num_actors": 2}
    assert micro_batches(resolve(config(training__batch_size=12, training__micro_batch_size=3, **changes))) == 2


@pytest.mark.parametrize(
    ("ratio", "steps", "total", "expected"),
    [(0.0, None, 60, 0), (0.03, None, 60, 2), (1.0, None, 7, 7), (0.5, 3, 60, 3), (0.5, 0, 60, 0)],
)
def test_warmup_steps(ratio, steps, total, expected):
    assert warmup_steps(config(training__warmup_ratio=ratio, training__warmup_steps=steps), total) == expected


def test_a_warmup_longer_than_the_run_is_refused():
    with pytest.raises(ConfigError, match=r"warmup_steps\(9\) > steps\(8\)"):
        warmup_steps(config(training__warmup_steps=9), 8)


def test_model_directories(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for path in ("./missing", "/missing", "~/missing-model", "a/b/c"):
        with pytest.raises(ConfigError, match=f"model_name={path} is not a directory"):
            check_model_dir(path)
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError, match="model_name=model has no config.json"):
        check_model_dir("model")
    (tmp_path / "model" / "config.json").write_text("{}")
    check_model_dir("model")
    check_model_dir("Qwen/Qwen2.5-VL-3B-Instruct")


@pytest.mark.parametrize("nbytes", [18, 16, 12, 10])
@pytest.mark.parametrize("zero", [{}, {"zero_stage": 2, "zero_engine": "fsdp"}, {"zero_stage": 3, "tensor": 2}])
def test_torch_and_whole_states_take_every_form(nbytes, zero):
    given = {"parallelism": "data", "num_actors": 4, "dtype": "bfloat16", "state_bytes": nbytes, **zero}
    assert resolve(config(**{f"text__{key}": value for key, value in given.items()})).text.state_bytes == nbytes


@pytest.mark.parametrize(
    ("tensor", "asked", "engine"), [(1, "auto", "deepspeed"), (2, "auto", "fsdp"), (1, "fsdp", "fsdp")]
)
def test_torch_cuts_the_states_of_slices_and_deepspeed_whole_ones(tensor, asked, engine):
    text = {"parallelism": "data", "num_actors": 4, "tensor": tensor, "zero_stage": 3, "zero_engine": asked}
    resolved = resolve(config(**{f"text__{key}": value for key, value in text.items()}))
    assert (resolved.text.zero_engine, resolved.text.data) == (engine, 4 // tensor)


def test_a_run_has_an_audio_part_where_its_section_has_actors():
    plain = compose_config("tiny", overrides=["training.batch_size=16"])
    assert plain.audio.num_actors == find_key("audio.num_actors").default == 0
    assert list(parts(resolve(plain))) == ["vision", "text"]
    asked = ["audio.parallelism=data", "audio.num_actors=3"]
    hearing = resolve(compose_config("tiny", overrides=asked))
    assert list(parts(hearing)) == ["vision", "audio", "text"]
    assert (hearing.audio.data, hearing.audio.model_name) == (3, hearing.text.model_name)
    assert compose_config("tiny", overrides=["audio.num_actors=0"]).audio == Config().audio


def test_alpha_of_adapters_is_twice_their_rank() -> None:
    found = resolve(config(text__lora=LoraConfig(rank=4)))
    assert found.text.lora.alpha == 8.0 and resolve(found).text.lora == found.text.lora
    assert found.vision.lora == LoraConfig()


def test_the_limit_of_a_collective_is_ten_minutes_or_a_step_s():
    limits = [ClusterConfig(), ClusterConfig(step_timeout_s=60.0), ClusterConfig(collective_timeout_s=20.0)]
    assert [collective_timeout_s(cluster) for cluster in limits] == [600.0, 60.0, 20.0]
