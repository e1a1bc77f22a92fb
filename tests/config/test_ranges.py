"""The range of each single field."""

import math

import pytest

from dhp.config.command_line import compose_config
from dhp.config.data import DataConfig, DatasetEntry, LimitsConfig
from dhp.config.ranges import check_cluster, check_data, check_seed, check_training
from dhp.config.schema import ClusterConfig
from dhp.config.training import GroupConfig, TrainingConfig
from dhp.core.errors import ConfigError

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
        ({"transport": "nccl"}, "cluster.transport=nccl does not exist; choose from auto, shared_memory"),
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
