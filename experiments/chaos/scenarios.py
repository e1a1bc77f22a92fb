"""Runs that faults meet: their settings, and what is in their directory when they begin."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.chaos.points import DAMAGED, FRESH, KEPT, PIPELINE, RESUMED

LONG = "long"  # steps enough for a fault from outside to meet them
RESUMED_FROM, DAMAGED_STEP = 4, 6
USERS_FILES = ("notes.txt", "checkpoints/mine/weights.bin")  # of the user's, which no run may remove
_KEPT = ("training.save_total_limit=2", "training.eval_steps=2", "training.best_metric=eval_loss")


@dataclass(frozen=True)
class Lengths:
    """Steps of a run, and steps between two checkpoints."""

    steps: int
    save_steps: int


def lengths_of(scenario: str) -> Lengths:
    """Of a run of the scenario."""
    return Lengths(40, 4) if scenario == LONG else Lengths(8, 2)


def settings(
    scenario: str, assets: Path, run_dir: Path, more: Sequence[str] = (), lengths: Lengths | None = None
) -> list[str]:
    """Arguments of `python -m dhp.train_ray`. lengths: others than the scenario's own."""
    own = ["--config-name=tiny", f"tiny_assets={assets}", f"run_dir={run_dir}"]
    of = lengths or lengths_of(scenario)
    own += [f"training.max_steps={of.steps}", f"training.save_steps={of.save_steps}", "training.log_interval=1"]
    own += ["data.num_workers=1", "cluster.threads_per_actor=1", "cluster.step_timeout_s=20"]
    if scenario == KEPT:
        own += [*_KEPT, "data.eval_datasets=[shapes]"]
    if scenario == PIPELINE:
        own += ["text.parallelism=pipeline"]
    return [*own, *more]


def reference_of(scenario: str) -> str:
    """The scenario whose undisturbed run a run is compared with."""
    return FRESH if scenario in (RESUMED, DAMAGED) else scenario


def prepare(scenario: str, reference: Path, run_dir: Path) -> list[str]:
    """Make a run's directory as the run is to find it; the arguments that go with it. reference: of the undisturbed
    run, from which a run that is continued is taken."""
    begins_at = {RESUMED: RESUMED_FROM, DAMAGED: DAMAGED_STEP}.get(scenario)
    if begins_at is not None:
        shutil.copytree(reference, run_dir, symlinks=True)
        for folder in run_dir.glob("checkpoints/step_*"):
            if int(folder.name[5:]) > begins_at:
                shutil.rmtree(folder)
    if scenario == DAMAGED:
        flip_bit(next((run_dir / "checkpoints" / f"step_{DAMAGED_STEP}" / "text").glob("rank_*.safetensors")))
    for name in USERS_FILES:
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).write_text("the user's own")
    return [] if begins_at is None else ["training.resume=auto"]


def flip_bit(file: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
