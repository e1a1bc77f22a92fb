"""The loss of a checkpoint on samples that training does not see, by plain transformers."""

from __future__ import annotations

import contextlib
import shutil
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForImageTextToText

from dhp.batch.reader import BatchReader, make_reader
from dhp.cli import export
from dhp.config.schema import Config
from dhp.core.batch import IGNORED
from dhp.plan.batches import feed_settings
from dhp.trainer.preflight import prepare

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
