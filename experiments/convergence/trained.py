"""One run of a method, and its losses along the way."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers.utils import logging

from dhp.checkpoint.folder import step_of
from dhp.config.command_line import compose_config
from dhp.observe.metrics import StepMetrics
from dhp.tiny.made_pictures import ANNOTATIONS, make_dataset, texts
from dhp.tiny.tiny_model import make_tiny_model
from experiments.balance_effect.entry import place, train
from experiments.convergence.heldout import HeldOut
from experiments.convergence.methods import METHODS

CONFIG = Path(__file__).with_name("config.yaml")
HELD_OUT_SEED = 1  # of the generated samples; those of training have seed 0


@dataclass(frozen=True)
class Work:
    """What every run shares: where it writes, passes over the data, steps between two evaluations, and the data."""

    folder: Path
    epochs: int
    save_steps: int
    data: Path
    held_out: HeldOut


def make_work(folder: Path, epochs: int, save_steps: int, samples: int, held_out: int) -> Work:
    """Generate both datasets below `folder`: that many samples to train on and to hold out."""
    logging.disable_progress_bar()  # small files
    data = make_dataset(folder / "data", samples)
    unseen = make_dataset(folder / "unseen", held_out, HELD_OUT_SEED)
    any_model = make_tiny_model(folder / "model-0", texts(data), 0)  # all have the same tokenizer
    own = [*place(any_model, unseen, ANNOTATIONS), f"run_dir={folder / 'read'}"]
    return Work(folder, epochs, save_steps, data, HeldOut(compose_config(CONFIG.stem, str(CONFIG.parent), own)))


def run(method: str, seed: int, work: Work) -> Iterator[dict[str, Any]]:
    """Train with starting weights and data order of that seed; a row for each checkpoint, oldest first."""
    model = make_tiny_model(work.folder / f"model-{seed}", texts(work.data), seed)
    with tempfile.TemporaryDirectory(dir=work.folder) as name:
        run_dir = Path(name) / "run"
        length = [f"training.num_epochs={work.epochs}", f"training.save_steps={work.save_steps}", f"seed={seed}"]
        steps = train(CONFIG, run_dir, [*place(model, work.data, ANNOTATIONS), *METHODS[method], *length])
        last = 0
        for checkpoint in sorted((run_dir / "checkpoints").iterdir(), key=step_of):
            step = step_of(checkpoint)
            yield {
                "method": method,
                "seed": seed,
                "step": step,
                "epoch": round(steps[step - 1].epoch, 3),
                "samples": sum(s.samples for s in steps[:step]),
                "train_loss": round(_mean_loss(steps[last:step]), 5),
                "heldout_loss": round(work.held_out.loss(checkpoint), 5),
            }
            last = step
            shutil.rmtree(checkpoint)


def _mean_loss(steps: Sequence[StepMetrics]) -> float:
    """Nats a target token over several steps."""
    return sum(s.loss * s.target_tokens for s in steps) / sum(s.target_tokens for s in steps)
