"""A course: training stages one after another, each from the weights of the one before it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dhp.base.errors import ConfigError, DhpError
from dhp.base.new_folder import new_folder
from dhp.checkpoint.folder import find_checkpoint
from dhp.config.course import GROUP, TrainingStage, training_stages
from dhp.config.parts import model_name, parts
from dhp.config.schema import Config
from dhp.config.shipped import shipped_directory
from dhp.models.registry import auxiliary_files
from dhp.models.rope import change_positions
from dhp.observe.metrics import read_metrics
from dhp.run.exporting import export_whole
from dhp.run.preflight import prepare

RECORD = "stages.json"
START = "start"  # in a stage's directory: the model that it begins with

Train = Callable[[Config], None]


def run_course(config: Config, train: Train, say: Callable[[str], None]) -> None:
    """Run every stage of `config.stages` that is not done yet, from where it stopped. train: runs one, prepared.

    All are checked before the first begins. run_dir/stages.json has a line for each that is done. Raises DhpError;
    ConfigError names the stage.
    """
    root = Path(config.run_dir)
    stages = training_stages(config, shipped_directory() / GROUP)
    prepared = [_prepared(stage, stages) for stage in stages]
    if config.training.dry_run:
        for stage, own in zip(stages, prepared, strict=True):
            say(f"\nstage {stage.number} of {len(stages)}: {stage.name}")
            train(own)
        return
    if config.overwrite:
        _remove(root)
    before: TrainingStage | None = None
    for stage in stages:
        told = f"stage {stage.number} of {len(stages)}, {stage.name}"
        if _is_done(stage.folder):
            say(f"{told}: done, in {stage.folder}")
        else:
            say(f"{told}: in {stage.folder}")
            with _telling(stage, say):
                train(prepare(_from(stage, before, say), say=say))
        _record(root, stage)
        before = stage
    say(f"all {len(stages)} stages are done; {root / RECORD} tells of each")


@contextmanager
def _telling(stage: TrainingStage, say: Callable[[str], None]) -> Iterator[None]:
    """Say how the course goes on where the stage ends before its end."""
    try:
        yield
    except (DhpError, KeyboardInterrupt):
        say(f"the course stops in stage {stage.number}, {stage.name}; the same command with this run_dir goes on there")
        raise


def _prepared(stage: TrainingStage, stages: Sequence[TrainingStage]) -> Config:
    """The stage's configuration, checked with the model of the first: what it begins with has the same shape."""
    try:
        return prepare(stage.config, new_run=stage.config.training.dry_run)
    except DhpError as error:
        raise type(error)(f"stage {stage.number} of {len(stages)}, {stage.name}: {error}") from error


def _from(stage: TrainingStage, before: TrainingStage | None, say: Callable[[str], None]) -> Config:
    """The stage's configuration with the model that it begins with, which is made where it is not there yet."""
    if before is None and stage.rope_theta is None and stage.max_positions is None:
        return stage.config
    folder = stage.folder / START
    if not folder.is_dir():
        say(f"writing the model that it begins with to {folder}")
        with new_folder(folder) as partial:
            if before is None:
                _link(stage.config, partial)
            else:
                export_whole(find_checkpoint(before.folder), partial)
            if stage.rope_theta is not None or stage.max_positions is not None:
                change_positions(partial, stage.rope_theta, stage.max_positions)
    own: dict[str, Any] = {name: replace(part, model_name=str(folder)) for name, part in parts(stage.config).items()}
    return replace(stage.config, **own)


def _link(config: Config, folder: Path) -> None:
    """A model's directory again, without another copy of its weights."""
    source = Path(model_name(config))
    if not source.is_dir():
        raise ConfigError(f"model_name={source} is no directory, as rope_theta and max_positions of a first stage need")
    folder.mkdir()
    for file in auxiliary_files(str(source)):
        shutil.copy(file, folder / file.name)
    for file in source.iterdir():
        if not (folder / file.name).exists() and file.is_file():
            os.symlink(file.resolve(), folder / file.name)


def _is_done(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / "summary.json").read_text(encoding="utf-8"))["status"] == "completed")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _record(root: Path, stage: TrainingStage) -> None:
    """Add a stage that is done to the course's record."""
    path = root / RECORD
    told: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    steps = read_metrics(stage.folder)
    losses = [step.loss for step in steps if step.loss is not None]
    told[stage.folder.name] = {
        "steps": len(steps),
        "tokens": sum(step.tokens or 0 for step in steps),
        "seconds": round(sum(step.step_s or 0.0 for step in steps), 3),
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "checkpoint": str(find_checkpoint(stage.folder)),
    }
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def _remove(root: Path) -> None:
    """Directories of the stages that an earlier course left here, by its record, and the record."""
    path = root / RECORD
    if not path.is_file():
        return
    for name in json.loads(path.read_text(encoding="utf-8")):
        if (root / name / "config.yaml").is_file() and Path(name).name == name:
            shutil.rmtree(root / name)
    path.unlink()
