"""The training stages of a curriculum: the configuration of each, from the run's and its own settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from dhp.config.command_line import to_config
from dhp.config.keys import translated_errors, unknown_keys
from dhp.config.schema import Config, StageEntry
from dhp.core.errors import ConfigError, raise_all
from dhp.core.text import did_you_mean, nearest

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

    Raises ConfigError for a recipe that does not exist and for settings that are none.
    """
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
