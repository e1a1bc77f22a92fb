"""What is not said follows from what is."""

from copy import deepcopy

import pytest

from dhp.config.command_line import compose_config
from dhp.config.data import DataConfig, DatasetEntry
from dhp.config.devices import GIB, KINDS, Figure, find_device, find_link, known_devices, known_links
from dhp.config.generate_request import unbalanced
from dhp.config.keys import find_key
from dhp.config.parts import parts
from dhp.config.ranges import DECAYS, LR_SCHEDULES, check_learning_rate, decay_steps
from dhp.config.resolve import check_model_dir, collective_timeout_s, resolve
from dhp.config.schema import ClusterConfig, Config, LoraConfig, PartConfig
from dhp.config.training import GroupConfig, TrainingConfig
from dhp.core.errors import ConfigError
from dhp.parallel.optim.learning_rates import KINDS as RATE_KINDS
from dhp.parallel.optim.learning_rates import RateCurve, learning_rate_at
from dhp.plan.batches import feed_settings

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
            {"vision__parallelism": "tensor", "vision__num_actors": 2, "vision__zero_stage": 1},
            ["vision.zero_stage=1 with vision.zero_engine=auto and vision.tensor=2", "Set vision.zero_stage=2"],
        ),
        (
            {"text__parallelism": "autotp", "text__num_actors": 2, "text__ring": 2, "text__tensor": 1},
            ["text.parallelism=autotp with text.ulysses=1 and text.ring=2", "Set text.parallelism=tensor or sequence"],
        ),
        ({"vision__parallelism": "tensr"}, ["vision.parallelism=tensr", "did you mean tensor?"]),
        ({"text__parallelism": "sequnce"}, ["text.parallelism=sequnce", "did you mean sequence?"]),
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
            {
                "text__parallelism": "data",
                "text__num_actors": 2,
                "text__zero_stage": 2,
                "text__zero_engine": "deepspeed",
                "text__expert": 2,
            },
            ["text.zero_engine=deepspeed with text.zero_stage=2 and text.expert=2", "Set text.zero_engine=fsdp"],
        ),
        (
            {"text__parallelism": "data", "text__num_actors": 2, "text__zero_stage": 1, "text__expert": 2},
            ["text.zero_stage=1 with text.zero_engine=auto and text.expert=2", "Set text.zero_stage=2"],
        ),
        (
            {"text__parallelism": "deepspeed", "text__num_actors": 2, "text__zero_stage": 2, "text__expert": 2},
            ["text.expert=2 makes FSDP2 the engine of ZeRO", "Set text.parallelism=data, or text.expert=1"],
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
            {"text__mlp_chunks": 2, "text__compile": True},
            ["text.mlp_chunks=2 with text.compile=true", "Set text.compile=false, or text.mlp_chunks=1"],
        ),
        (
            {"text__mlp_chunks": 2, "text__expert": 2, "text__parallelism": "data", "text__num_actors": 2},
            ["text.mlp_chunks=2 with text.expert=2", "Set text.expert=1, or text.mlp_chunks=1"],
        ),
        ({"text__expert_load": 0.5}, ["text.expert_load=0.5", "expert_load >= 1"]),
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
            {"vision__attention_backend": "flash_attention_2", "vision__dtype": "bfloat16", "cluster__device": "cpu"},
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


FORMATS = ("bfloat16", "float16", "tfloat32", "float32")


def test_every_figure_has_a_kind_and_a_source() -> None:
    for device in known_devices().values():
        shares = (device.products, device.attention, device.elementwise)
        assert all(0 < share.value < 1 and share.kind in KINDS and share.source for share in shares)
        for figure in (*device.peaks.values(), device.memory, device.bandwidth):
            assert figure.kind in KINDS and figure.source
        assert all(peak.kind == "stated" and peak.source.startswith("NVIDIA ") for peak in device.peaks.values())
        assert device.link in known_links()
    for link in known_links().values():
        assert all(figure.kind in KINDS and figure.source for figure in (link.rate, link.reached, link.latency))


def test_formats_stand_in_order_and_names_are_of_one_device() -> None:
    names = [name for device in known_devices().values() for name in device.names]
    assert len(names) == len(set(names))
    for device in known_devices().values():
        peaks = [device.peaks[one].value for one in FORMATS if one in device.peaks]
        assert peaks == sorted(peaks, reverse=True) and 1e12 < peaks[-1] and peaks[0] < 3e15


def test_figures_have_units() -> None:
    h100, nvlink = find_device("h100"), find_link("nvlink4")
    assert h100.peaks["bfloat16"].value == 989.4e12 and h100.memory == Figure(79.1 * GIB, "assumed", h100.memory.source)
    assert h100.bandwidth.value == 3.35e12 and h100.link == "nvlink4"
    assert (
        nvlink.rate.value == 450e9
        and nvlink.bytes_s == pytest.approx(378e9)
        and nvlink.latency.value == pytest.approx(15e-6)
    )
    assert find_device("NVIDIA H100 80GB HBM3") is h100
    assert find_link("ib400").rate.value == 50e9


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("h1000", "device=h1000 is not known; did you mean h100"),
        ("tpu", "device=tpu is not known. Known are b200, h200"),
    ],
)
def test_an_unknown_device_is_answered_with_the_known_ones(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")) as caught:
        find_device(name)
    assert "add an entry" in str(caught.value) and "configs/devices/devices.json" in str(caught.value)


def test_an_unknown_link_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"link=nvlink is not known; did you mean nvlink.\? Known are .*links.json"):
        find_link("nvlink")


BALANCED, PLANNED = "data.balance=balanced", ("text.recompute=auto", "memory.budget_gib=1")
NO_TOWER = ("vision.recompute=auto", "memory.budget_gib=1", "training.frozen=[vision,projector]")


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ((), False),
        ((BALANCED,), False),
        (PLANNED, False),
        ((BALANCED, *PLANNED), True),
        ((BALANCED, "vision.recompute=auto", "memory.budget_gib=1"), True),
        ((BALANCED, *NO_TOWER), False),  # backward does not go through it
        ((BALANCED, *NO_TOWER, "vision.lora.rank=2"), True),
        ((BALANCED, *PLANNED, "data.fullest_first=false"), False),
        ((BALANCED, "data.fullest_first=true"), True),
        (("data.fullest_first=false",), False),
    ],
)
def test_null_is_on_where_a_plan_is_made_and_lengths_are_known(settings: tuple[str, ...], wanted: bool) -> None:
    given = compose_config("tiny", overrides=list(settings))
    config = resolve(given)
    assert config.data.fullest_first is wanted and feed_settings(config).balancing.fullest_first is wanted
    assert resolve(config).data.fullest_first is wanted
    assert given.data.fullest_first is None or wanted == given.data.fullest_first


def test_lengths_must_be_known() -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(compose_config("tiny", overrides=["data.fullest_first=true"]))
    assert str(caught.value).startswith(
        "data.fullest_first=true with data.balance=random, which knows no lengths. Set "
    )
    trained = resolve(compose_config("tiny", overrides=[BALANCED, "data.fullest_first=true"]))
    assert unbalanced(trained.data).fullest_first is False  # its checkpoints are evaluated on plain rows


STABLE = {"lr_scheduler_type": "warmup_stable_decay"}
COSINE = {"lr_scheduler_type": "cosine"}


def test_each_schedule_and_each_decay_that_may_be_asked_for_is_there():
    assert LR_SCHEDULES == RATE_KINDS
    for decay in DECAYS:
        assert learning_rate_at(3, 1.0, 0, RateCurve("warmup_stable_decay", 4, decay_steps=2, decay_type=decay)) < 1


@pytest.mark.parametrize("kind", LR_SCHEDULES)
def test_defaults_go_with_each_schedule(kind):
    check_learning_rate(TrainingConfig(lr_scheduler_type=kind))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lr_scheduler_type": "cosin"}, "choose from constant, linear, cosine, .*; did you mean cosine?"),
        ({"lr_scheduler_type": "cosine_with_min_lr"}, "; did you mean cosine, with training.min_lr?"),
        ({"lr_scheduler_type": "wsd"}, "; did you mean warmup_stable_decay?"),
        ({"min_lr": 1e-5}, "training.min_lr=1e-05 with training.lr_scheduler_type=constant, which does not read it"),
        (COSINE | {"min_lr": 0.1}, r"0 <= min_lr <= learning_rate\(0.001\). It is a learning rate, not a share"),
        (COSINE | {"min_lr": -0.1}, "training.min_lr=-0.1 is out of range"),
        (COSINE | {"min_lr": float("nan")}, "training.min_lr=nan is out of range"),
        (COSINE | {"lr_num_cycles": 2}, "Set training.lr_scheduler_type=cosine_with_restarts, or leave"),
        (COSINE | {"lr_decay_steps": 2}, "training.lr_decay_steps=2 with .*Set .*=warmup_stable_decay, or leave"),
        (COSINE | {"lr_decay_ratio": 0.2}, "training.lr_decay_ratio=0.2 with"),
        (COSINE | {"lr_decay_type": "linear"}, "training.lr_decay_type=linear with"),
        ({"lr_scheduler_type": "cosine_with_restarts", "lr_num_cycles": 0}, "lr_num_cycles >= 1"),
        (STABLE | {"lr_decay_steps": -1}, "lr_decay_steps >= 0"),
        (STABLE | {"lr_decay_ratio": 1.1}, "0 <= lr_decay_ratio <= 1"),
        (STABLE | {"lr_decay_type": "lineer"}, "choose from cosine, linear, 1-sqrt; did you mean linear?"),
    ],
)
def test_what_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        check_learning_rate(TrainingConfig(**changes))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [(STABLE, 3), (STABLE | {"lr_decay_ratio": 0.5}, 11), (STABLE | {"lr_decay_steps": 6}, 6), (COSINE, 0)],
)
def test_steps_of_the_decay(changes, expected):
    assert decay_steps(TrainingConfig(**changes), 21, 4) == expected


@pytest.mark.parametrize(("key", "value"), [("lr_decay_steps", 6), ("lr_decay_ratio", 0.6)])
def test_a_decay_that_begins_in_the_warmup(key, value):
    with pytest.raises(
        ConfigError, match=rf"training.{key}={value} .*warmup_steps\(5\) \+ decay_steps\(6\) > steps\(10\)"
    ):
        decay_steps(TrainingConfig(**STABLE, **{key: value}), 10, 5)
    assert decay_steps(TrainingConfig(**STABLE, **{key: value}), 11, 4) in (6, 7)


def test_the_warm_up_of_a_group_leaves_room_for_the_decay_too() -> None:
    given = ["training.lr_scheduler_type=warmup_stable_decay", "training.lr_decay_steps=50"]
    groups = ["+training.groups.projector.warmup_steps=80"]
    config = compose_config("tiny", None, [*given, *groups])
    with pytest.raises(ConfigError, match=r"training.groups.projector.warmup_steps\(80\) \+ decay_steps\(50\) > steps"):
        decay_steps(config.training, 100, 10)
    assert decay_steps(compose_config("tiny", None, given).training, 100, 10) == 50
