"""One run of a method, and its losses along the way on samples that training does not see, by plain transformers."""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForImageTextToText
from transformers.utils import logging

from dhp.batch.build import make_reader
from dhp.batch.reader import BatchReader
from dhp.checkpoint.folder import step_of
from dhp.cli import export
from dhp.config.command_line import compose_config
from dhp.config.schema import Config
from dhp.core.batch import IGNORED
from dhp.observe.metrics import StepMetrics
from dhp.tiny.model import make_tiny_model
from dhp.tiny.pictures import ANNOTATIONS, make_dataset, texts
from dhp.trainer.preflight import prepare
from dhp.trainer.settings import feed_settings
from experiments.convergence.summary import METHODS
from experiments.made_set import place, train

Inputs = dict[str, Tensor]


class HeldOut:
    """The data of a configuration, decoded once: its steps are the batches of an evaluation."""

    def __init__(self, config: Config):
        feed = make_reader(feed_settings(prepare(config)))
        self._batches = [batch for step in range(feed.steps(1)) for batch in _batches(feed, step)]

    def loss(self, checkpoint: Path) -> float:
        """Nats a target token of the exported model. Exports to a folder beside the checkpoint and removes it."""
        folder = checkpoint.with_name(f"{checkpoint.name}_exported")
        with contextlib.redirect_stdout(sys.stderr):  # the report goes to stdout
            export.main([str(checkpoint), str(folder)])
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False).eval()
        shutil.rmtree(folder)
        sums = [_loss_sum(model, batch) for batch in self._batches]
        return sum(total for total, _ in sums) / sum(targets for _, targets in sums)


@torch.inference_mode()
def _loss_sum(model: torch.nn.Module, batch: Inputs) -> tuple[float, int]:
    """Σ token losses of a padded batch, and its target tokens."""
    named = {name: tensor for name, tensor in batch.items() if name != "labels"}
    logits = model(**named, use_cache=False).logits[:, :-1].flatten(0, 1)
    targets = batch["labels"][:, 1:].flatten()
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    return float(loss), int((targets != IGNORED).sum())


def _batches(feed: BatchReader, step: int) -> list[Inputs]:
    """The micro-batches of a step, for every replica, as arguments of the plain model."""
    named = feed.model_inputs(step)
    found: dict[str, Inputs] = {}
    for key, tensor in named.items():
        rows, _, name = key.rpartition("/")
        found.setdefault(rows, {})[name] = tensor
    return list(found.values())


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
                "method": method, "seed": seed, "step": step, "epoch": round(steps[step - 1].epoch, 3),
                "samples": sum(s.samples for s in steps[:step]), "train_loss": round(_mean_loss(steps[last:step]), 5),
                "heldout_loss": round(work.held_out.loss(checkpoint), 5),
            }  # fmt: skip
            last = step
            shutil.rmtree(checkpoint)


def _mean_loss(steps: Sequence[StepMetrics]) -> float:
    """Nats a target token over several steps."""
    return sum(s.loss * s.target_tokens for s in steps) / sum(s.target_tokens for s in steps)
