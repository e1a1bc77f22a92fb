"""Resolves a user's configuration into a run's."""

import os
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dhp.config.command_line import to_config
from dhp.config.generate_request import check_layout
from dhp.config.hydra_errors import translated_errors
from dhp.config.keys import unknown_keys
from dhp.config.layout import LAYOUTS, resolve_part
from dhp.config.parts import OPTIONAL, decoder, encoders, parts, sections, split_share
from dhp.config.preferences import PREFERENCES, check_preference
from dhp.config.ranges import (
    check_cluster,
    check_data,
    check_memory,
    check_seed,
    check_training,
    require,
    require_choice,
)
from dhp.config.rules import FSDP, check_balance, check_optimizer, check_run, with_engine
from dhp.config.schema import ClusterConfig, Config, StageEntry
from dhp.config.steps import micro_batches
from dhp.core.errors import ConfigError, raise_all
from dhp.core.files import without_file_scheme
from dhp.core.text import did_you_mean, nearest

COLLECTIVE_TIMEOUT_S = 600.0  # torch's own for NCCL


def resolve(config: Config, reads: bool = True) -> Config:
    """A new configuration with every degree a number and every default that depends on another value set.

    Each rule that needs no file and no model is checked here, so that nothing starts from a configuration
    that cannot run. reads: it reads datasets. Raises ConfigError."""
    check_seed(config.seed)
    require_choice("layout", config.layout, LAYOUTS)
    check_training(config.training)
    check_data(config.data, reads)
    check_memory(config.memory)
    check_cluster(config.cluster)
    _check_absent(config)
    model_name = _shared_model_name(config)
    found: dict[str, Any] = {}
    errors = []
    for name, part in parts(config).items():
        try:
            asked = with_engine(config.training.optimizer, part)
            found[name] = replace(resolve_part(name, asked), model_name=model_name)
        except ConfigError as error:
            errors.append(error)
    raise_all(errors)
    resolved = replace(deepcopy(config), **found)
    check_together(resolved)
    if resolved.data.fullest_first is None:
        resolved.data.fullest_first = resolved.data.balance != "random" and _plans_recomputing(resolved)
    _fill_paths(resolved)
    # torch reads 0 as "scale every gradient to nothing"; here 0 and null both mean no clipping.
    resolved.training.max_grad_norm = config.training.max_grad_norm or None
    return resolved


def check_together(config: Config) -> None:
    """Rules of a resolved configuration between its parts and the rest. Raises ConfigError."""
    check_run(config)
    check_optimizer(config)
    check_preference(config)
    check_evaluation(config)
    check_balance(config)
    micro_batches(config)


def collective_timeout_s(cluster: ClusterConfig) -> float:
    """cluster.collective_timeout_s, or its default."""
    given = cluster.collective_timeout_s
    return min(COLLECTIVE_TIMEOUT_S, cluster.step_timeout_s) if given is None else given


def check_model_dir(name: str) -> None:
    """Raise ConfigError when `name` looks like a path and is no Hugging Face model directory.

    A path starts with `/`, `.` or `~`, has more than one slash, or exists; anything else is a hub id and
    passes."""
    path = Path(name).expanduser()
    if not (name.startswith(("/", ".", "~")) or name.count("/") > 1 or path.exists()):
        return
    remedy = "Give the directory of config.json and the safetensors, or a hub id as Qwen/Qwen2.5-VL-3B-Instruct."
    if not path.is_dir():
        raise ConfigError(f"model_name={name} is not a directory ({path.absolute()}). {remedy}")
    if not (path / "config.json").is_file():
        raise ConfigError(f"model_name={name} has no config.json ({path.absolute()}). {remedy}")


def _plans_recomputing(config: Config) -> bool:
    """Whether a part has recompute=auto. Backward does not go through an encoder that is frozen as a whole and has no
    adapters, so nothing is planned for that one."""
    still = {name for name, part in encoders(config).items() if name in config.training.frozen and not part.lora.rank}
    return any(part.recompute == "auto" for name, part in parts(config).items() if name not in still)


def _check_absent(config: Config) -> None:
    """Refuse settings of a part that the run does not have, which would be ignored. Raises ConfigError."""
    for name in OPTIONAL:
        section = sections(config)[name]
        if name not in parts(config) and section != sections(Config())[name]:
            raise ConfigError(
                f"{name} has settings, but {name}.num_actors=0: the run has no such part. Set {name}.num_actors to 1 "
                f"or more for a model that has one, or leave the section {name} out"
            )


def _shared_model_name(config: Config) -> str:
    given = {f"{name}.model_name": part.model_name for name, part in parts(config).items() if part.model_name}
    if not given:
        raise ConfigError(
            "vision.model_name and text.model_name are not set; set one of them to a Hugging Face directory or hub id"
        )
    first, *others = given
    for other in others:
        if given[other] != given[first]:
            raise ConfigError(
                f"{first}={given[first]} != {other}={given[other]}: all parts come from one checkpoint for now, "
                f"so {first} = {other}. Set both alike, or only one."
            )
    return _expanded(given[first])


def _fill_paths(config: Config) -> None:
    config.run_dir = _expanded(config.run_dir)
    if config.tiny_assets is not None:
        config.tiny_assets = _expanded(config.tiny_assets)
    checkpoint_dir = config.training.checkpoint_dir or str(Path(config.run_dir) / "checkpoints")
    config.training.checkpoint_dir = _expanded(checkpoint_dir)
    config.training.resume = _expanded(config.training.resume)
    if config.memory.cache_dir is not None:
        config.memory.cache_dir = _expanded(config.memory.cache_dir)
    if config.data.cache_dir is None:
        config.data.cache_dir = str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "dhp")
    config.data.cache_dir = _expanded(config.data.cache_dir)
    if config.data.cache_features is not None:
        config.data.cache_features = _expanded(config.data.cache_features)
    if config.data.chat_template is not None:
        config.data.chat_template = _expanded(config.data.chat_template)
    config.data.data_registry = {
        name: replace(entry, annotation_path=_expanded(entry.annotation_path), data_path=_expanded(entry.data_path))
        for name, entry in config.data.data_registry.items()
    }


def _expanded(path: str) -> str:
    """`~` is replaced here because a shell leaves it alone inside `key=~/value`; a file: address by its path."""
    path = without_file_scheme(path)
    return str(Path(path).expanduser()) if path.startswith("~") else path


LOSS = "eval_loss"  # of all of data.eval_datasets together; with /NAME of one
# Metrics of evaluations by which a run may end: 1, better where they are higher; -1, where they are lower.
MARGIN = "eval_margin"
SIGNS = {LOSS: -1, "eval_accuracy": 1, "eval_exact": 1, MARGIN: 1}


def check_evaluation(config: Config) -> None:
    """Raises ConfigError for datasets that the registry does not have, and for keys that would say nothing."""
    names, registered = [split_share(text)[0] for text in config.data.eval_datasets], list(config.data.data_registry)
    for name in names:
        if name not in registered:
            raise ConfigError(
                f"data.eval_datasets={list(config.data.eval_datasets)}: {name} is not in data.data_registry, which has "
                f"{', '.join(registered) or 'none'}{did_you_mean([nearest(name, registered)])}"
            )
    if len(set(names)) < len(names):
        raise ConfigError(f"data.eval_datasets={list(config.data.eval_datasets)} names a dataset twice; name each once")
    asked = {
        key: getattr(config.training, key) for key in ("eval_steps", "eval_on_start", "best_metric", "eval_answers")
    }
    for key, value in (asked | {"early_stopping.metric": config.training.early_stopping.metric}).items():
        if value and not names:
            raise ConfigError(
                f"training.{key}={value}, but data.eval_datasets is empty: nothing would be "
                "evaluated. Set data.eval_datasets=[NAME], with names from data.data_registry"
            )
    if config.training.eval_answers:
        remedy = "set training.eval_answers=0, and ask a checkpoint by `python -m dhp generate`"
        check_answers(config, f"training.eval_answers={config.training.eval_answers}", remedy)
    training = config.training
    saves = training.save_final or training.save_steps or training.save_epochs or training.save_minutes
    if training.best_metric is not None and not saves:
        raise ConfigError(
            f"training.best_metric={training.best_metric} with training.save_final=false, and save_steps and "
            "save_epochs are null: there is no checkpoint that could be the best. Set one of them"
        )
    stopping = training.early_stopping
    for key, value, metrics in (
        ("best_metric", training.best_metric, [LOSS]),
        ("early_stopping.metric", stopping.metric, [*SIGNS]),
    ):
        known = [*metrics, *(f"{metric}/{name}" for metric in metrics for name in names)]
        if value is not None and value not in known:
            hint = did_you_mean([nearest(value, known)])
            raise ConfigError(f"training.{key}={value} does not exist; choose from {', '.join(known)}{hint}")
    require(stopping.patience >= 1, "training.early_stopping.patience", stopping.patience, "patience >= 1")
    require(stopping.min_delta >= 0, "training.early_stopping.min_delta", stopping.min_delta, "min_delta >= 0")
    metric, compares = str(stopping.metric).partition("/")[0], training.objective in PREFERENCES
    if (metric == "eval_exact" and compares) or (metric == MARGIN and training.objective == "sft"):
        raise ConfigError(
            f"training.early_stopping.metric={stopping.metric} with training.objective={training.objective}, of which "
            "no evaluation has it. Set the metric to eval_loss or eval_accuracy"
        )
    if stopping.metric is not None and training.eval_steps is None:
        raise ConfigError(
            f"training.early_stopping.metric={stopping.metric} with training.eval_steps=null: there is one evaluation, "
            "behind the last step. Set training.eval_steps"
        )


def check_answers(config: Config, wish: str, remedy: str) -> None:
    """Raises ConfigError for layouts of a resolved configuration in which the ranks that train cannot answer. wish:
    what asks for answers."""
    text = decoder(config)
    check_layout(text, remedy)
    if text.zero_stage == 3 or (text.zero_stage and text.zero_engine == FSDP):
        raise ConfigError(
            f"{wish} with text.zero_stage={text.zero_stage} by {text.zero_engine}: weights "
            f"are cut over all replicas, and would be gathered for each new token; {remedy}"
        )
    for key, value in (("compile", text.compile), ("parallelism", text.parallelism == "autotp")):
        if value:
            raise ConfigError(
                f"{wish} with text.{key}={str(getattr(text, key)).lower()}: these "
                f"layers are not known to take one token at a time; {remedy}"
            )


GROUP = "stage"  # the folder of configs/ that has recipes of stages
_ONCE = ("stages", "run_dir")  # keys that a stage cannot set, because the run sets them


@dataclass(frozen=True)
class TrainingStage:
    """A stage as it is run. number: from 1; config: not resolved yet."""

    number: int
    name: str
    config: Config
    rope_theta: float | None
    max_positions: int | None


def training_stages(config: Config, directory: Path) -> list[TrainingStage]:
    """Every stage of a run, in order. directory: with the recipes.

    Raises ConfigError for a recipe that does not exist and for settings that are none."""
    if config.training.elastic:
        raise ConfigError(
            f"training.elastic={config.training.elastic} with stages: each stage has a layout of its own, and smaller "
            "ones are found for one. Leave training.elastic out, or train the stages one by one"
        )
    stages = []
    for number, (name, entry) in enumerate(config.stages.items(), start=1):
        _check(name, entry)
        own = _merged(config, name, _recipe(name, entry, directory), entry.settings)
        folder = f"{number}_{name}"
        training = own.training
        if training.checkpoint_dir is not None:
            training = replace(training, checkpoint_dir=str(Path(training.checkpoint_dir) / folder))
        if not training.dry_run:
            training = replace(training, resume="auto")
        if not own.training.save_final:
            raise ConfigError(
                f"training.save_final=false in stages.{name}: a stage hands its last checkpoint on. Leave it out"
            )
        own = replace(own, stages={}, overwrite=False, training=training, run_dir=str(Path(config.run_dir) / folder))
        stages.append(TrainingStage(number, name, own, entry.rope_theta, entry.max_positions))
    return stages


def _check(name: str, entry: StageEntry) -> None:
    if not name.replace("_", "").replace("-", "").isalnum():
        raise ConfigError(f"stages.{name}: the name becomes a directory's; take letters, digits, - and _")
    for key, value in (("rope_theta", entry.rope_theta), ("max_positions", entry.max_positions)):
        if value is not None and value <= 0:
            raise ConfigError(f"stages.{name}.{key}={value} must be positive")


def _recipe(name: str, entry: StageEntry, directory: Path) -> Mapping[str, Any]:
    found = sorted(path.stem for path in directory.glob("*.yaml"))
    wanted = name if entry.recipe is None else entry.recipe
    if wanted in found:
        with translated_errors():
            loaded = OmegaConf.load(directory / f"{wanted}.yaml")
        assert isinstance(loaded, DictConfig)
        return {str(key): value for key, value in loaded.items()}
    if entry.recipe is not None:
        raise ConfigError(
            f"stages.{name}.recipe={wanted} does not exist in {directory}{did_you_mean([nearest(wanted, found)])}; "
            f"there are {', '.join(found)}"
        )
    return {}


def _merged(config: Config, name: str, *settings: Mapping[str, Any]) -> Config:
    for own in settings:
        for key in _ONCE:
            if key in own:
                raise ConfigError(f"stages.{name}.settings.{key}: the run sets it for all of its stages. Leave it out")
        raise_all(unknown_keys(own, where=f"stages.{name}.settings: "))
    with translated_errors():
        merged = OmegaConf.merge(OmegaConf.structured(config), *(OmegaConf.create(dict(own)) for own in settings))
        assert isinstance(merged, DictConfig)
        return to_config(merged)
