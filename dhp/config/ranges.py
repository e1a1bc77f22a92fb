"""Checks single settings: which values each may have."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from dhp.config.data import DataConfig
from dhp.config.parts import HEARING, read_datasets, split_share
from dhp.config.schema import ClusterConfig, LoraConfig, MemoryConfig, PartConfig
from dhp.config.training import TrainingConfig
from dhp.core.errors import ConfigError
from dhp.core.graph import TRANSPORTS
from dhp.core.kinds import names
from dhp.core.parameters import NF4
from dhp.core.text import did_you_mean, nearest

CONSTANT, RESTARTS, STABLE = "constant", "cosine_with_restarts", "warmup_stable_decay"
LR_SCHEDULES = (CONSTANT, "linear", "cosine", RESTARTS, STABLE)
DECAYS = ("cosine", "linear", "1-sqrt")
# By others' names, ours, with what to bear in mind.
_MEANT = MappingProxyType(
    {
        "cosine_with_min_lr": "cosine, with training.min_lr",
        "constant_with_warmup": "constant, with training.warmup_steps",
        "cosine_with_hard_restarts": f"{RESTARTS}, with training.lr_num_cycles",
        "wsd": STABLE,
    }
)
_DEFAULTS = TrainingConfig()
# By key, the schedules that it says something about.
_ABOUT = {
    "min_lr": tuple(kind for kind in LR_SCHEDULES if kind != CONSTANT),
    "lr_num_cycles": (RESTARTS,),
    "lr_decay_steps": (STABLE,),
    "lr_decay_ratio": (STABLE,),
    "lr_decay_type": (STABLE,),
}


def check_learning_rate(training: TrainingConfig) -> None:
    """Raises ConfigError for values out of range, and for a key that the schedule would not read."""
    kind = training.lr_scheduler_type
    if kind not in LR_SCHEDULES:
        hint = did_you_mean([_MEANT.get(kind.lower()) or nearest(kind, LR_SCHEDULES)])
        raise ConfigError(
            f"training.lr_scheduler_type={kind} does not exist; choose from {', '.join(LR_SCHEDULES)}{hint}"
        )
    for key, kinds in _ABOUT.items():
        value = getattr(training, key)
        if kind not in kinds and value != getattr(_DEFAULTS, key):
            raise ConfigError(
                f"training.{key}={value} with training.lr_scheduler_type={kind}, which does not read it. Set "
                f"training.lr_scheduler_type={' or '.join(kinds)}, or leave training.{key} out"
            )
    low, peak = training.min_lr, training.learning_rate
    if not (math.isfinite(low) and 0 <= low <= peak):
        raise ConfigError(
            f"training.min_lr={low} is out of range: 0 <= min_lr <= learning_rate({peak:g}). It is a learning rate, "
            "not a share of one: set it to the share times training.learning_rate"
        )
    _check_waves(training)


def _check_waves(training: TrainingConfig) -> None:
    if training.lr_num_cycles < 1:
        raise ConfigError(f"training.lr_num_cycles={training.lr_num_cycles} is out of range: lr_num_cycles >= 1")
    steps, ratio, by = training.lr_decay_steps, training.lr_decay_ratio, training.lr_decay_type
    if steps is not None and steps < 0:
        raise ConfigError(f"training.lr_decay_steps={steps} is out of range: lr_decay_steps >= 0")
    if not 0 <= ratio <= 1:
        raise ConfigError(f"training.lr_decay_ratio={ratio} is out of range: 0 <= lr_decay_ratio <= 1, of all steps")
    if by not in DECAYS:
        hint = did_you_mean([nearest(by, DECAYS)])
        raise ConfigError(f"training.lr_decay_type={by} does not exist; choose from {', '.join(DECAYS)}{hint}")


def decay_steps(training: TrainingConfig, total_steps: int, warmup_steps: int) -> int:
    """The last steps of a run, over which warmup_stable_decay falls: training.lr_decay_steps, else lr_decay_ratio of
    `total_steps` rounded up; 0 with another schedule.

    Raises ConfigError where warm-up and decay are longer than the run together."""
    if training.lr_scheduler_type != STABLE:
        return 0
    given = training.lr_decay_steps
    steps = math.ceil(total_steps * training.lr_decay_ratio) if given is None else given
    warmed = {f"training.groups.{name}.": one.warmup_steps or 0 for name, one in training.groups.items()}
    section, warmup = max({"": warmup_steps, **warmed}.items(), key=lambda item: item[1])
    if warmup + steps > total_steps:
        key = f"lr_decay_ratio={training.lr_decay_ratio:g}" if given is None else f"lr_decay_steps={given}"
        raise ConfigError(
            f"training.{key} leaves no room for the warm-up: {section}warmup_steps({warmup}) + decay_steps({steps}) > "
            f"steps({total_steps}). Lower one of them, or raise training.num_epochs or training.max_steps"
        )
    return steps


DATA_FORMATS = ("auto", "llava", "sharegpt", "openai", "alpaca", "swift", "text")
TURN_COLUMNS = ("role", "content", "from", "value")  # of each turn; the others are a sample's
COLUMNS = (
    *("messages", "conversations", "conversation", "system", "image", "images", "video", "videos", "audio", "audios"),
    *("instruction", "input", "output", "query", "response", "history", "text", *TURN_COLUMNS),
)
BALANCE = ("random", "isf", "balanced")
MEAN, PAPER = LIMIT_RULES = ("mean", "paper")
SEQUENTIAL, VISION_AHEAD, GPIPE, ONE_F_ONE_B, INTERLEAVED = SCHEDULES = (
    "sequential",
    "vision_ahead",
    "gpipe",
    "1f1b",
    "interleaved",
)
LOGGERS = ("wandb", "mlflow", "swanlab")
_SEEDS = 2**32  # numpy takes no larger seed


def require(holds: bool, field: str, value: object, rule: str) -> None:
    """Raise ConfigError naming field, value and the rule (an equation with its remedy) unless `holds`."""
    if not holds:
        raise ConfigError(f"{field}={value} is out of range: {rule}")


def require_positive(field: str, value: float) -> None:
    """Raise ConfigError unless the number is finite and at least 1 (whole) or above 0 (fraction)."""
    lowest = f"{field} >= 1" if isinstance(value, int) else f"{field} > 0 and finite"
    require(math.isfinite(value) and value > 0, field, value, lowest)


def require_choice(field: str, value: str, choices: Sequence[str], meant: Mapping[str, str] | None = None) -> None:
    """Raise ConfigError unless the value is one of the choices. meant: for words of others, the choice they mean."""
    if value not in choices:
        known = (meant or {}).get(value.lower())
        suggestion = did_you_mean([known if known in choices else nearest(value, choices)])
        raise ConfigError(f"{field}={value} does not exist; choose from {', '.join(choices)}{suggestion}")


def with_plugins(key: str, choices: Sequence[str]) -> tuple[str, ...]:
    """The choices of a key, and behind them those that plugins registered."""
    return (*choices, *(name for name in names(key) if name not in choices))


def check_seed(seed: int) -> None:
    """Raises ConfigError for a seed that numpy or torch would refuse."""
    require(0 <= seed < _SEEDS, "seed", seed, f"0 <= seed < {_SEEDS}")


def _is_trace(given: Any) -> bool:
    if isinstance(given, bool):
        return True
    whole = isinstance(given, list) and all(isinstance(one, int) and not isinstance(one, bool) for one in given)
    return whole and len(given) == 2 and 1 <= given[0] <= given[1]


def check_training(training: TrainingConfig) -> None:
    """Raises ConfigError for the first field out of its range."""
    counts = ("batch_size", "micro_batch_size", "num_epochs", "log_interval", "max_steps", "save_steps")
    _require_positive("training", training, *counts, "save_total_limit", "save_epochs", "save_minutes")
    _require_positive("training", training, "save_timeout_s", "eval_steps", "vision_batch")
    # eps: else a weight without a gradient would be divided by 0.
    _require_positive("training", training, "eval_answer_tokens", "eps")
    require(_is_trace(training.trace), "training.trace", training.trace, "true, false, or two steps as [500, 510]")
    answers = training.eval_answers
    require(answers >= 0, "training.eval_answers", answers, "eval_answers >= 0")
    broken = training.max_nonfinite_steps
    require(broken >= 0, "training.max_nonfinite_steps", broken, "training.max_nonfinite_steps >= 0")
    require(training.resume != "", "training.resume", '""', "never, auto, or the path of a checkpoint or run")
    _require_not_negative("training", training, "learning_rate", "weight_decay", "max_grad_norm")
    _require_not_negative("training", training, "max_restarts", "restart_wait_s", "elastic_wait_s")
    fits = not training.elastic or training.max_restarts > 0
    require(fits, "training.elastic", training.elastic, "training.max_restarts > 0, as it is for runs that start again")
    betas = training.betas
    fits = len(betas) == 2 and all(0 <= beta < 1 for beta in betas)
    require(fits, "training.betas", betas, "two numbers with 0 <= beta < 1, as [0.9, 0.999]")
    check_learning_rate(training)
    require_choice(
        "training.schedule", training.schedule, SCHEDULES, {"pipedream": "1f1b", "1f1b_interleaved": INTERLEAVED}
    )
    _check_loggers(training)
    ratio = training.warmup_ratio
    require(0 <= ratio <= 1, "training.warmup_ratio", ratio, "0 <= warmup_ratio <= 1, a fraction of all steps")
    _check_warmup("training", training.warmup_steps, training.max_steps)
    for name, group in training.groups.items():
        plain = "a name without +, which joins the names of groups that are about the same parameters"
        require("+" not in name, "training.groups", name, plain)
        _require_not_negative(f"training.groups.{name}", group, "learning_rate", "weight_decay")
        _check_warmup(f"training.groups.{name}", group.warmup_steps, training.max_steps)


def _check_loggers(training: TrainingConfig) -> None:
    for name in training.loggers:
        written = "others: TensorBoard's files are always written, into run_dir/tb. Leave it out"
        require(name.lower() != "tensorboard", "training.loggers", name, written)
        require_choice("training.loggers", name, LOGGERS)
    twice = len(set(training.loggers)) < len(training.loggers)
    require(not twice, "training.loggers", training.loggers, "each of them once")
    project = training.logger_project
    require(project is None or bool(project.strip()), "training.logger_project", project, "a name, or null")


def _check_warmup(section: str, steps: int | None, max_steps: int | None) -> None:
    if steps is None:
        return
    require(steps >= 0, f"{section}.warmup_steps", steps, "warmup_steps >= 0")
    if max_steps is not None:
        rule = (
            f"warmup_steps({steps}) > max_steps({max_steps}), so the learning rate would never arrive; "
            f"lower {section}.warmup_steps or raise training.max_steps"
        )
        require(steps <= max_steps, f"{section}.warmup_steps", steps, rule)


def check_data(data: DataConfig, reads: bool = True) -> None:
    """Raises ConfigError for values out of range and, where datasets are read, for those that the registry does not
    have."""
    require_choice("data.positions", data.positions, ("published", "library"))
    require_choice("data.on_bad_sample", data.on_bad_sample, ("error", "skip"))
    require_choice("data.balance", data.balance, with_plugins("data.balance", BALANCE))
    _require_not_negative("data", data, "locality_slack")
    require(data.num_workers >= 0, "data.num_workers", data.num_workers, "num_workers >= 0")
    if data.prefetch is not None:
        require(data.prefetch >= 0, "data.prefetch", data.prefetch, "prefetch >= 0")
    require_choice("data.limits.rule", data.limits.rule, LIMIT_RULES)
    _require_positive("data.limits", data.limits, "text", "vision", "full_text", "full_vision")
    sizes = ("min_pixels", "max_pixels", "max_tiles", "video_max_pixels", "video_whole_frames", "max_tokens")
    balance = ("isf_passes", "balance_window", "long_tokens")
    fetching = ("cache_gib", "fetch_tries", "fetch_s")
    _require_positive("data", data, *balance, "video_fps", "cache_features_gib", *sizes, *fetching)
    require(data.video_max_frames >= 2, "data.video_max_frames", data.video_max_frames, "video_max_frames >= 2")
    if data.cache_features_gib is not None:
        rule = "it bounds data.cache_features, which is not set; set both or neither"
        require(data.cache_features is not None, "data.cache_features_gib", data.cache_features_gib, rule)
    if data.min_pixels is not None and data.max_pixels is not None:
        rule = f"min_pixels({data.min_pixels}) > max_pixels({data.max_pixels}); lower one or raise the other"
        require(data.min_pixels <= data.max_pixels, "data.min_pixels", data.min_pixels, rule)
    if reads:
        _check_datasets(data)


def check_memory(memory: MemoryConfig) -> None:
    """Raises ConfigError for the first field out of its range."""
    _require_positive("memory", memory, "budget_gib")


def _check_datasets(data: DataConfig) -> None:
    registered = list(data.data_registry)
    if not data.datasets:
        raise ConfigError(
            f"data.datasets=[] names no dataset; set data.datasets=[NAME] with names from data.data_registry, "
            f"which has {', '.join(registered) or 'none yet'}"
        )
    for name, _ in map(split_share, data.datasets):
        if name not in data.data_registry:
            raise ConfigError(
                f"data.datasets={data.datasets}: {name} is not in data.data_registry, which has "
                f"{', '.join(registered) or 'none'}; add data.data_registry.{name}.annotation_path=FILE and "
                f"data.data_registry.{name}.data_path=DIRECTORY{did_you_mean([nearest(name, registered)])}"
            )
    for name in read_datasets(data):
        if name not in data.data_registry:
            continue  # of eval_datasets: `dhp.config.resolve` says so
        entry = data.data_registry[name]
        if not entry.annotation_path:
            raise ConfigError(f"data.data_registry.{name}.annotation_path is not set; give the path")
        require_choice(f"data.data_registry.{name}.format", entry.format, DATA_FORMATS)
        require_positive(f"data.data_registry.{name}.weight", float(entry.weight))
        for ours, theirs in entry.columns.items():
            _check_column(f"data.data_registry.{name}.columns.{ours}={theirs}", ours)


def _check_column(given: str, ours: str) -> None:
    if ours not in COLUMNS:
        raise ConfigError(
            f"{given}: {ours} is no name that a format knows; on the left stands one of {', '.join(COLUMNS)}, on the "
            f"right the file's own{did_you_mean([nearest(ours, COLUMNS)])}"
        )


def check_cluster(cluster: ClusterConfig) -> None:
    """Raises ConfigError for the first field out of its range."""
    require_choice("cluster.transport", cluster.transport, ("auto", *TRANSPORTS))
    require_choice("cluster.device", cluster.device, ("auto", "cpu", "cuda"))
    limits = ("start_timeout_s", "step_timeout_s", "collective_timeout_s")
    _require_positive("cluster", cluster, *limits, "threads_per_actor", "devices")
    collective_s = cluster.collective_timeout_s
    if collective_s is not None and collective_s > cluster.step_timeout_s:
        raise ConfigError(
            f"cluster.collective_timeout_s={collective_s:g} > cluster.step_timeout_s={cluster.step_timeout_s:g}: a "
            "step without progress would end the run first, without the names of the ranks that others wait for. Set "
            "cluster.collective_timeout_s to null or to less, or raise cluster.step_timeout_s"
        )
    if not re.fullmatch(r"local|auto|(ray://)?[^\s/:]+:\d+|\[[0-9a-fA-F:]+\]:\d+", cluster.address):
        raise ConfigError(
            f"cluster.address={cluster.address} is not an address; set it to local (a Ray of this run's own), "
            "auto (the running cluster), ray://host:port or host:port"
        )


def _require_positive(section: str, settings: object, *keys: str) -> None:
    """As `require_positive` of these keys of a section, as far as they are set."""
    for key in keys:
        if getattr(settings, key) is not None:
            require_positive(f"{section}.{key}", getattr(settings, key))


def _require_not_negative(section: str, settings: object, *keys: str) -> None:
    for key in keys:
        field, value = f"{section}.{key}", getattr(settings, key)
        fits = value is None or (math.isfinite(value) and value >= 0)
        require(fits, field, value, f"{field} >= 0 and finite")


def resolve_lora(lora: LoraConfig) -> LoraConfig:
    """The same with its alpha a number, where there are adapters."""
    return replace(lora, alpha=2.0 * lora.rank) if lora.rank and lora.alpha is None else lora


def check_lora(name: str, part: PartConfig) -> None:
    """Raises ConfigError for values out of range. Which layouts have adapters is in `dhp.config.rules.PART_RULES`."""
    lora, key = part.lora, f"{name}.lora"
    require(lora.rank >= 0, f"{key}.rank", lora.rank, "rank >= 0; 0 is none")
    if not lora.rank:
        if lora != LoraConfig():
            raise ConfigError(f"{key} has settings, but {key}.rank=0: there are no adapters. Set {key}.rank, as 16")
        return
    require_positive(f"{key}.alpha", float(lora.alpha or 0.0))
    require(0.0 <= lora.dropout < 1.0, f"{key}.dropout", lora.dropout, "0 <= dropout < 1")
    if lora.quantization is not None:
        require_choice(f"{key}.quantization", lora.quantization, (NF4,))
        if name == HEARING:
            raise ConfigError(
                f"{key}.quantization={lora.quantization}: layers of audio towers were never tested in four bits. Leave "
                f"{key}.quantization out."
            )
