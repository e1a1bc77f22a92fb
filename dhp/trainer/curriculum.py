"""Runs training stages one after another, each from the last."""

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from dhp.checkpoint.folder import checkpoints, find_checkpoint
from dhp.checkpoint.resume import NEVER
from dhp.config.devices import shipped_directory
from dhp.config.parts import model_name, parts
from dhp.config.resolve import GROUP, TrainingStage, training_stages
from dhp.config.run_dir import refuse_to_remove
from dhp.config.schema import Config
from dhp.core.errors import ConfigError, DhpError
from dhp.core.files import new_folder, write_whole
from dhp.core.locks import locked
from dhp.models.base_files import WIDER
from dhp.models.config_file import change_positions
from dhp.models.pretrained import auxiliary_files
from dhp.observe.metrics import read_metrics
from dhp.trainer.export_run import export_whole
from dhp.trainer.planned_layout import with_layout
from dhp.trainer.preflight import prepare

NAME = "stages.json"
_STEPS = "steps"  # an entry has it from the stage's end on


class CurriculumRecord:
    """Entries by the name of a stage's directory, in the order in which they began; each change is written at once.

    Raises ConfigError for a file that is none."""

    def __init__(self, run_dir: Path):
        self.path = run_dir / NAME
        self._entries: dict[str, dict[str, Any]] = {}
        if self.path.is_file():
            try:
                entries = json.loads(self.path.read_text(encoding="utf-8"))
                self._entries = {str(name): dict(entry) for name, entry in entries.items()}
            except (ValueError, TypeError, AttributeError) as error:
                raise ConfigError(
                    f"{self.path} is no record of training stages ({error}): restore it, or choose another run_dir"
                ) from error

    @property
    def begun(self) -> list[str]:
        """Names of the stages that have begun."""
        return list(self._entries)

    def has_ended(self, name: str) -> bool:
        """Whether the stage's end is written down."""
        return _STEPS in self._entries.get(name, {})

    def made_with(self, name: str) -> Mapping[str, Any]:
        """The `made_with` that `begin` recorded for a stage."""
        return self._entries.get(name, {})

    def begin(self, name: str, made_with: Mapping[str, Any]) -> None:
        """A stage begins, or goes on. made_with: what its start is made with, by key."""
        self._entries[name] = self._entries.get(name, {}) | dict(made_with)
        self._write()

    def end(self, name: str, account: Mapping[str, Any]) -> None:
        """A stage is done. account: what the record says of it, `steps` among it."""
        self._entries[name] = self._entries.get(name, {}) | dict(account)
        self._write()

    def remove(self) -> None:
        """No stage has begun any more."""
        self._entries = {}
        self.path.unlink(missing_ok=True)

    def _write(self) -> None:
        write_whole(self.path, json.dumps(self._entries, indent=1) + "\n")


START = "start"  # the model that a stage begins with
_LENGTH = ("max_steps", "num_epochs")  # of training: with others a stage that was done goes on

Train = Callable[[Config], None]


@dataclass(frozen=True)
class CheckedStage:
    """A stage that was checked. prepared: with the model of the first stage, which has the shape of its own."""

    stage: TrainingStage
    prepared: Config
    number_of: int

    @property
    def label(self) -> str:
        return f"stage {self.stage.number} of {self.number_of}, {self.stage.name}"

    @property
    def folder(self) -> Path:
        """Its run directory."""
        return Path(self.prepared.run_dir)

    @property
    def checkpoints(self) -> Path:
        """The directory of its checkpoints."""
        return Path(str(self.prepared.training.checkpoint_dir))

    @property
    def start(self) -> Path:
        """Next to its checkpoints where they have a folder of their own: one that all machines see."""
        return (self.folder if self.stage.config.training.checkpoint_dir is None else self.checkpoints) / START

    def has_begun(self, record: CurriculumRecord) -> bool:
        """Whether something of it is there."""
        return self.folder.name in record.begun and (self.folder.is_dir() or self.checkpoints.is_dir())

    @property
    def is_done(self) -> bool:
        """Whether it was trained as long as it is to be."""
        try:
            ended = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))["status"]
            trained = yaml.safe_load((self.folder / "config.yaml").read_text(encoding="utf-8"))["training"]
            same = all(trained[key] == getattr(self.prepared.training, key) for key in _LENGTH)
        except (OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
            return False
        return bool(ended == "completed" and same)


def run_curriculum(config: Config, train: Train, say: Callable[[str], None]) -> None:
    """Run every stage of `config.stages` that is not done yet, from where it stopped. train: runs one, prepared.

    All are checked before the first begins. run_dir/stages.json has an entry for each that has begun. Raises DhpError;
    ConfigError names the stage."""
    stages = _checked_stages(config, say)
    if config.training.dry_run:
        for one in stages:
            say(f"\n{one.label}")
            train(one.prepared)
        return
    folder = stages[0].folder.parent
    with locked(folder, "run_dir", say):
        _train_stages(CurriculumRecord(folder), stages, config.overwrite, train, say)


def _train_stages(
    record: CurriculumRecord, stages: Sequence[CheckedStage], overwrite: bool, train: Train, say: Callable[[str], None]
) -> None:
    if overwrite:
        _remove(record, stages)
    _require_order(record, stages)
    before: CheckedStage | None = None
    for one in stages:
        name = one.folder.name
        record.begin(name, _made_with(one, record))
        if one.is_done and record.has_ended(name):
            say(f"{one.label}: done, in {one.folder}")
        else:
            if not one.is_done:
                say(f"{one.label}: in {one.folder}")
                with _telling(one, overwrite, say):
                    train(prepare(_from(one, before, say), say=say))
            record.end(name, _account(one))
        before = one
    say(f"all {len(stages)} stages are done; {record.path} tells of each")


def _checked_stages(config: Config, say: Callable[[str], None]) -> list[CheckedStage]:
    stages = training_stages(config, shipped_directory() / GROUP)
    checked = []
    for stage in stages:
        try:
            fresh = NEVER if config.overwrite else stage.config.training.resume  # what is there will be removed
            training = replace(stage.config.training, resume=fresh)
            of_stage = replace(stage.config, training=training)
            planned = with_layout(of_stage, partial(_say_of, stage.name, say), new_run=False)
            training = replace(planned.training, resume=stage.config.training.resume)
            stage = replace(stage, config=replace(planned, training=training))
            own = prepare(stage.config, new_run=stage.config.training.dry_run)
        except DhpError as error:
            raise type(error)(f"stage {stage.number} of {len(stages)}, {stage.name}: {error}") from error
        checked.append(CheckedStage(stage, own, len(stages)))
    return checked


def _say_of(stage: str, say: Callable[[str], None], line: str) -> None:
    say(f"{stage}: {line}")


def _require_order(record: CurriculumRecord, stages: Sequence[CheckedStage]) -> None:
    """Raise ConfigError where a stage is to be trained and a later one has begun with what it was."""
    for one in stages:
        later = [other for other in stages[one.stage.number :] if other.has_begun(record)]
        if later and not one.is_done:
            raise ConfigError(
                f"{one.label}, is to be trained, and {later[0].folder} has begun with what {one.folder} was. Put that "
                f"back (its {' and '.join(_LENGTH)} too), or {_removing(later)} to train from here on anew"
            )


def _removing(stages: Sequence[CheckedStage]) -> str:
    places = [place for one in stages for place in (one.folder, one.checkpoints) if place.is_dir()]
    outer = [place for place in places if not any(place != o and place.is_relative_to(o) for o in places)]
    return f"remove {', '.join(map(str, outer))}"


@contextmanager
def _telling(one: CheckedStage, overwrite: bool, say: Callable[[str], None]) -> Iterator[None]:
    """Say how the curriculum goes on where the stage ends before its end."""
    try:
        yield
    except (DhpError, KeyboardInterrupt):
        keeping = " and overwrite=false" if overwrite else ""
        say(
            f"the curriculum stops in stage {one.stage.number}, {one.stage.name}; the same command with this run_dir"
            f"{keeping} goes on there"
        )
        raise


def _made_with(one: CheckedStage, record: CurriculumRecord) -> dict[str, Any]:
    """Positions, which must be those that the stage began with, if it has: raises ConfigError."""
    own = _positions(one.stage)
    known = record.made_with(one.folder.name)
    for key, value in own.items():
        if one.has_begun(record) and known.get(key) != value:
            raise ConfigError(
                f"stages.{one.stage.name}.{key}={value}, and the stage in {one.folder} began with {known.get(key)}. "
                f"Set that again, or {_removing([one])} to begin the stage anew"
            )
    return own


def _positions(stage: TrainingStage) -> dict[str, Any]:
    return {"rope_theta": stage.rope_theta, "max_positions": stage.max_positions}


def _from(one: CheckedStage, before: CheckedStage | None, say: Callable[[str], None]) -> Config:
    """The stage's configuration with the model that it begins with, which is made where it does not exist yet."""
    stage, positions = one.stage, _positions(one.stage)
    changes = any(value is not None for value in positions.values())
    if before is None and not changes:
        return stage.config
    if not one.start.is_dir():
        say(f"writing the model that it begins with to {one.start}")
        with new_folder(one.start) as partial:
            if before is None:
                _link(one.prepared, partial)
            else:
                export_whole(
                    find_checkpoint(before.checkpoints), partial, pictures=False, dtype=WIDER
                )  # bounds are each stage's
            if changes:
                change_positions(partial, **positions)
    start = str(one.start)
    own: dict[str, Any] = {name: replace(part, model_name=start) for name, part in parts(stage.config).items()}
    return replace(stage.config, **own)


def _link(prepared: Config, folder: Path) -> None:
    """A model's directory again, without another copy of its weights."""
    source = Path(model_name(prepared))
    if not source.is_dir():
        raise ConfigError(f"model_name={source} is no directory, as rope_theta and max_positions of a first stage need")
    folder.mkdir()
    for file in auxiliary_files(str(source)):
        shutil.copy(file, folder / file.name)
    for file in source.iterdir():
        if not (folder / file.name).exists() and file.is_file():
            os.symlink(file.resolve(), folder / file.name)


def _account(one: CheckedStage) -> dict[str, Any]:
    """The record's entry for a stage that is done."""
    steps = read_metrics(one.folder)
    losses = [step.loss for step in steps if step.loss is not None]
    newest = next(iter(checkpoints(one.checkpoints)), None)
    return {
        "steps": len(steps),
        "tokens": sum(step.tokens or 0 for step in steps),
        "seconds": round(sum(step.step_s or 0.0 for step in steps), 3),
        "first_loss": losses[0] if losses else None,
        "last_loss": losses[-1] if losses else None,
        "checkpoint": None if newest is None else str(newest),
    }


def _remove(record: CurriculumRecord, stages: Sequence[CheckedStage]) -> None:
    """Remove what an earlier curriculum left here: the directories of its stages, by its record, and the record.

    Checkpoints in a training.checkpoint_dir elsewhere stay, as those of runs do, and no stage may go on with them:
    raises ConfigError for them, as for what this curriculum reads."""
    root = record.path.parent
    folders = [root / name for name in record.begun if Path(name).name == name and _is_stage(root / name)]
    for one in stages:
        refuse_to_remove(folders, one.prepared)
        elsewhere = not one.checkpoints.absolute().is_relative_to(one.folder.absolute())
        if elsewhere and one.checkpoints.is_dir() and any(one.checkpoints.iterdir()):
            raise ConfigError(
                f"overwrite=true removes nothing outside of run_dir, and {one.checkpoints} holds files of another "
                f"training, with which {one.label}, would go on. Move them away, or choose another "
                "training.checkpoint_dir"
            )
    for folder in folders:
        shutil.rmtree(folder)
    record.remove()


def _is_stage(folder: Path) -> bool:
    return any((folder / name).exists() for name in ("config.yaml", START))
