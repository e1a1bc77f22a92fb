"""The start of a run: its first step, or a checkpoint that was made with the same settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from dhp.checkpoint.folder import (
    check_checkpoint,
    checkpoints,
    find_checkpoint,
    newest_checkpoint,
    quarantine,
    read_about,
    step_of,
)
from dhp.config.parts import PARTS
from dhp.core.errors import CheckpointError

AUTO, NEVER = "auto", "never"
TRAINED = {"training.trainable", "training.frozen", "lora"}  # settings that say what is trained
CONTENTS = "contents of"  # beginning of the settings that say which files are read
RECIPE = "recipe"  # among the settings: those that may change
LAYOUT = tuple(f"{part}." for part in PARTS)  # beginnings of the settings that say how a part is split


@dataclass(frozen=True)
class Start:
    """The start of a run.

    step: steps done before. skipped_samples: how many samples they left out.

    settings: those of the checkpoint, by key. data: its sampler's state of the order of samples.

    damaged: newer checkpoints that no run can continue from, with the reason."""

    checkpoint: Path | None = None
    step: int = 0
    skipped_samples: int = 0
    settings: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    damaged: tuple[tuple[Path, str], ...] = ()

    def quarantine(self) -> list[str]:
        """Rename the damaged ones, whose steps the run writes again; a line about each."""
        lines = "{} is skipped, and now named {}: {}"
        return [lines.format(old.name, quarantine(old).name, reason) for old, reason in self.damaged]

    def check(self, now: Mapping[str, Any]) -> None:
        """Refuse to continue a run that would see other samples, or is laid out otherwise on the ranks.

        now: this run's settings by key; all or some of those in the checkpoint. Raises CheckpointError.
        """
        if self.checkpoint is None:
            return
        other = [key for key, value in now.items() if self.settings.get(key) != value]
        other += _left_out(self.settings, now)
        if not other:
            return
        changed = "; ".join(f"{key} was {self.settings.get(key)} and is {now.get(key)}" for key in other)
        why = "a resumed run goes on with the samples after those seen, so the data's order and cut must stay"
        if any(key.startswith(LAYOUT) for key in other):
            why = (
                "a checkpoint is resumed in the layout that it was saved in. To go on in another one with its weights, "
                "but with a new optimizer and from the data's beginning: `python -m dhp export "
                f"{self.checkpoint} OUT`, and in another run_dir text.model_name=OUT vision.model_name=OUT "
                "training.resume=never"
            )
        if any(key.startswith(CONTENTS) for key in other):
            why = (
                "a resumed run goes on with the model and the data that it began with, and these files are others (of "
                "annotations a mended line counts: put the file back, and set data.on_bad_sample=skip)"
            )
        if TRAINED.intersection(other):
            why = "a checkpoint holds weights and optimizer states of what its run trained"
        raise CheckpointError(
            f"{self.checkpoint} does not continue as this run is configured: {changed}. Reason: {why}. Set what it "
            "had, or begin anew in another run_dir with training.resume=never"
        )

    def changes(self, now: Mapping[str, Any]) -> list[str]:
        """A line for each setting of the recipe that is not as it was in the checkpoint, and one for the others.

        now: this run's, by key.
        """
        kept = self.settings.get(RECIPE)
        if self.checkpoint is None or not isinstance(kept, Mapping):
            return []
        lines = [
            f"{key} was {kept.get(key)} up to step {self.step}, and is {now.get(key)} from there on"
            for key in sorted({*kept, *now})
            if kept.get(key) != now.get(key)
        ]
        return [*lines, f"{'else ' if lines else ''}the recipe is that of {self.checkpoint.name}"]


def _left_out(kept: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Keys of parts that the checkpoint has and a run with these settings has not."""
    parts = {key.partition(".")[0] for key in now if key.startswith(LAYOUT)}
    return [key for key in kept if parts and key.startswith(LAYOUT) and key.partition(".")[0] not in parts]


def find_start(resume: str, checkpoint_dir: Path, replaced: bool = False) -> Start:
    """What training.resume means for a run that writes its checkpoints to `checkpoint_dir`. replaced: those that are
    there will be removed before the run begins.

    Raises CheckpointError when the checkpoint that it names is not there or damaged, or when others are where the
    run's own would be written: those of another run, or newer ones. `auto` takes the newest that is complete.
    """
    newest = None if replaced else newest_checkpoint(checkpoint_dir)
    if resume == NEVER:
        if newest is not None:
            raise CheckpointError(
                f"training.checkpoint_dir={checkpoint_dir} holds {newest.name} of another run, and the two runs' would "
                "be mixed. Choose another checkpoint_dir, set training.resume=auto to continue that run, or move its "
                "checkpoints away"
            )
        return Start()
    if resume == AUTO:
        return Start() if newest is None else _newest_whole(checkpoint_dir)
    found = find_checkpoint(Path(resume))
    if newest is not None and step_of(newest) > read_about(found)["step"]:
        raise CheckpointError(
            f"training.resume={resume} begins after step {read_about(found)['step']}, but {checkpoint_dir} holds "
            f"{newest.name} already, and old and new ones would be mixed. Resume from {newest.name}, choose another "
            "run_dir, or move the newer checkpoints away"
        )
    return _start(found)


def _newest_whole(checkpoint_dir: Path) -> Start:
    unusable: list[tuple[Path, str]] = []
    for checkpoint in checkpoints(checkpoint_dir):
        try:
            return replace(_start(checkpoint), damaged=tuple(unusable))
        except CheckpointError as error:
            unusable.append((checkpoint, str(error)))
    reasons = "\n".join(f"  {checkpoint.name}: {reason}" for checkpoint, reason in unusable)
    raise CheckpointError(
        f"training.resume=auto finds no checkpoint in {checkpoint_dir} that can be continued from:\n{reasons}\n"
        "Mend or move these away; without any the run begins at step 1"
    )


def _start(checkpoint: Path) -> Start:
    about = read_about(checkpoint)
    if "data" not in about:
        raise CheckpointError(
            f"{checkpoint} does not say where it stopped in its data: an earlier release of dhp wrote it. It can be "
            "exported and trained from as a model (model_name), but not resumed"
        )
    check_checkpoint(checkpoint)
    return Start(checkpoint.absolute(), about["step"], about["skipped_samples"], about["settings"], about["data"])
