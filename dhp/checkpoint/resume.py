"""Finds where a run starts, and which settings must agree."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dhp.checkpoint.folder import (
    EARLY_STOPPING,
    LaterFormat,
    check_checkpoint,
    find_checkpoint,
    has_checksums,
    quarantine,
    read_about,
    step_folders,
    step_of,
)
from dhp.checkpoint.shard_files import REMEDY, Unreadable
from dhp.core.errors import CheckpointError
from dhp.core.process import say_nothing

AUTO, NEVER = "auto", "never"
CONTENTS = "contents of"  # beginning of the settings that say which files are read
# In a checkpoint's settings beside those that must stay: what decides the training otherwise, and what may change.
RECIPE, LAYOUT = "recipe", "layout"
PARTS = "parts"
OPTIMIZER = "training.optimizer"
_UNSAID_RECIPE = {"training.min_lr": 0.0}  # of its recipe
_UNSAID = {OPTIMIZER: "adamw"}  # what a checkpoint that lacks the key was made with
ALLOWED = "training.resume_changes"  # which of the recipe may be others all the same

_DATA = "a resumed run goes on with the samples after those seen, so the data's order and rows must stay"
_TRAINED = "a checkpoint holds weights and optimizer states of what its run trained"
_FILES = (
    "a resumed run goes on with the model and the data that it began with, and these files are others (of annotations "
    "a mended line counts: put the file back, and set data.on_bad_sample=skip)"
)
_STATES = "a checkpoint holds the states of the optimizer that made them, and another one has other states"
_RATES = "the learning rate follows one curve from the first step to the last; with another it jumps here"
_UPDATES = "the optimizer's averages of gradients so far were made with the other value"
_SAMPLES = "the samples that are left would be made in another way than those seen"
_OBJECTIVE = "the steps that are left would minimize something else"
# Why a setting must stay, by the beginning of its key: the first one that fits.
_REASONS = (
    (CONTENTS, _FILES),
    (PARTS, _TRAINED),
    ("training.trainable", _TRAINED),
    (OPTIMIZER, _STATES),
    ("training.frozen", _TRAINED),
    ("lora", _TRAINED),
    ("training.learning_rate", _RATES),
    ("training.lr_", _RATES),
    ("training.min_lr", _RATES),
    ("training.warmup", _RATES),
    ("training.total_steps", _RATES),
    ("training.groups", _RATES),
    ("training.objective", _OBJECTIVE),
    ("training.batch_size", _DATA),
    ("training.micro_batch_size", _DATA),
    ("training.", _UPDATES),
    ("data.packing", _SAMPLES),
    ("data.datasets", _DATA),
    ("data.samples", _DATA),
    ("data.shuffle", _DATA),
    ("data.balance", _DATA),
    ("data.", _SAMPLES),
    ("seed", _DATA),
)


@dataclass(frozen=True)
class Start:
    """The start of a run.

    step: steps done before. skipped_samples: how many samples they left out.

    settings: those of the checkpoint, by key. data: its sampler's state of the order of samples.

    damaged: newer checkpoints that no run can continue from, with the reason. parts: of the model, that it holds.
    early_stopping: as `dhp.trainer.early_stopping` keeps it."""

    checkpoint: Path | None = None
    step: int = 0
    skipped_samples: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    damaged: tuple[tuple[Path, str], ...] = ()
    parts: tuple[str, ...] = ()
    early_stopping: Mapping[str, Any] = field(default_factory=dict)

    def quarantine(self) -> list[str]:
        """Rename the damaged ones, whose steps the run writes again; a line about each."""
        lines = "{} is skipped, and now named {}: {}"
        return [lines.format(old.name, quarantine(old).name, reason) for old, reason in self.damaged]

    def check(self, now: Mapping[str, Any], parts: Collection[str] | None = None) -> None:
        """Refuse to continue a run that would see other samples, or trains something else.

        now: this run's settings by key; all or some of those in the checkpoint. parts: of this run's model. Raises
        CheckpointError."""
        if self.checkpoint is None:
            return
        before = {key: self.settings.get(key, _UNSAID.get(key)) for key in now}
        other = {key: (before[key], value) for key, value in now.items() if before[key] != value}
        if parts is not None and set(self.parts) != set(parts):
            other[PARTS] = (sorted(self.parts), sorted(parts))
        if other:
            self._refuse(other, "Set what it had, or begin anew in another run_dir with training.resume=never")

    def check_recipe(self, now: Mapping[str, Any], free: Collection[str], allowed: Collection[str]) -> None:
        """Refuse to continue a run that trains in another way.

        now: this run's recipe by key. free: keys that decide nothing that a curve of losses shows. allowed: by
        training.resume_changes, keys or sections of them. Raises CheckpointError."""
        kept = self.settings.get(RECIPE)
        if self.checkpoint is None or not isinstance(kept, Mapping):
            return
        before = {**_UNSAID_RECIPE, **kept}
        other = {
            key: (before[key], value)
            for key, value in now.items()
            if key in before and before[key] != value and key not in free and not _is_allowed(key, allowed)
        }
        if other:
            keys = ",".join(other)
            self._refuse(
                other,
                f"Set what it had; or, where you want the change, {ALLOWED}=[{keys}]; or begin anew in another run_dir "
                "with training.resume=never",
            )

    def changes(self, now: Mapping[str, Any], layout: Mapping[str, Any]) -> list[str]:
        """A line for each setting of the recipe that is not as it was in the checkpoint, one for the others, and one
        on the layout where it is another one.

        now: this run's recipe; layout: its degrees and what else may change; both by key."""
        kept = self.settings.get(RECIPE)
        if self.checkpoint is None or not isinstance(kept, Mapping):
            return []
        lines = [
            f"{key} was {kept.get(key)} up to step {self.step}, and is {now.get(key)} from there on"
            for key in sorted({*kept, *now})
            if kept.get(key) != now.get(key) and key in now
        ]
        lines += [f"{'else ' if lines else ''}the recipe is that of {self.checkpoint.name}"]
        before = self.settings.get(LAYOUT, self.settings)
        other = [key for key in layout if before.get(key, layout[key]) != layout[key]]
        moved = [f"{key} {before[key]} → {layout[key]}" for key in other]
        if moved:
            lines.append(f"another layout than the checkpoint's, whose tensors are cut anew: {', '.join(moved)}")
        return lines

    def _refuse(self, other: Mapping[str, tuple[Any, Any]], remedy: str) -> None:
        changed = "; ".join(f"{key} was {before} and is {value}" for key, (before, value) in other.items())
        reasons = "; ".join(dict.fromkeys(map(_reason, other)))
        raise CheckpointError(
            f"{self.checkpoint} does not continue as this run is configured: {changed}. Reason: {reasons}. {remedy}"
        )


def _reason(key: str) -> str:
    return next((reason for beginning, reason in _REASONS if key.startswith(beginning)), _DATA)


def _is_allowed(key: str, allowed: Collection[str]) -> bool:
    return any(key == one or key.startswith(f"{one}.") for one in allowed)


def find_start(
    resume: str, checkpoint_dir: Path, replaced: bool = False, say: Callable[[str], None] = say_nothing
) -> Start:
    """What training.resume means for a run that writes its checkpoints to `checkpoint_dir`. replaced: those that are
    there will be removed before the run begins. say: receives a line before much is read.

    Raises CheckpointError when the checkpoint that it names is not there or damaged, or when others are where the
    run's own would be written: those of another run, or newer ones. `auto` takes the newest that is complete."""
    newest = None if replaced else next(iter(step_folders(checkpoint_dir)), None)
    if resume == NEVER:
        if newest is not None:
            raise CheckpointError(
                f"training.checkpoint_dir={checkpoint_dir} holds {newest.name} of another run, and the two runs' would "
                "be mixed. Choose another checkpoint_dir, set training.resume=auto to continue that run, or move its "
                "checkpoints away"
            )
        return Start()
    if resume == AUTO:
        return Start() if newest is None else _newest_whole(checkpoint_dir, say)
    found = find_checkpoint(Path(resume))
    if newest is not None and step_of(newest) > read_about(found)["step"]:
        raise CheckpointError(
            f"training.resume={resume} begins after step {read_about(found)['step']}, but {checkpoint_dir} holds "
            f"{newest.name} already, and old and new ones would be mixed. Resume from {newest.name}, choose another "
            "run_dir, or move the newer checkpoints away"
        )
    return read_start(found, say)


def _newest_whole(checkpoint_dir: Path, say: Callable[[str], None]) -> Start:
    unusable: list[tuple[Path, str]] = []
    for checkpoint in step_folders(checkpoint_dir):
        try:
            return replace(read_start(checkpoint, say), damaged=tuple(unusable))
        except (LaterFormat, Unreadable):
            raise
        except CheckpointError as error:
            unusable.append((checkpoint, str(error).replace(f". {REMEDY}", "")))  # which is what is done here
    reasons = "\n".join(f"  {checkpoint.name}: {reason}" for checkpoint, reason in unusable)
    raise CheckpointError(
        f"training.resume=auto finds no checkpoint in {checkpoint_dir} that can be continued from:\n{reasons}\n"
        "Mend or move these away; without any the run begins at step 1"
    )


def read_start(checkpoint: Path, say: Callable[[str], None]) -> Start:
    """A checkpoint, looked through. Raises CheckpointError where it is damaged or cannot be resumed."""
    about = read_about(checkpoint)
    if "data" not in about:
        raise CheckpointError(
            f"{checkpoint} does not say where it stopped in its data: an earlier release of dhp wrote it. It can be "
            "exported and trained from as a model (model_name), but not resumed"
        )
    check_checkpoint(checkpoint, say)
    if not has_checksums(about):
        say(f"{checkpoint.name} is of format 1, without checksums: its sizes and headers were checked, not its values")
    kept = (about["step"], about["skipped_samples"], about["settings"], about["data"])
    stopping = about.get(EARLY_STOPPING, {})
    return Start(checkpoint.absolute(), *kept, parts=tuple(about["parts"]), early_stopping=stopping)
