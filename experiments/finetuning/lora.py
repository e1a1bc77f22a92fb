"""Adapters of rank 8, beside full training by the same trainers, and beside peft in a plain loop."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from torch import nn

from dhp.batch.collate import Collator
from dhp.batch.shard import BatchSharder
from dhp.core.parameters import AdapterSettings
from dhp.data.sampling.dataset import StepSamples
from dhp.models.family import Family
from dhp.models.lora import find_targets
from experiments.finetuning.ways import STATES, Trained, Way, require_bytes
from experiments.loops import MICRO_BATCHES, Data, MicroBatches, Plain, save_model
from experiments.pair import TEXT, VISION, join_alone

MODEL = "qwen2_5_vl"  # of `experiments.loops`
ADAPTERS = AdapterSettings(rank=8, alpha=16.0)
CLOSE = 1e-4  # relative: losses of the first step, before any update
FULL, OF_TEXT, OF_BOTH = "all", "lora_text", "lora_both"
TRAINED = {
    FULL: Trained(),
    OF_TEXT: Trained(("vision", "projector"), {TEXT: ADAPTERS}),
    OF_BOTH: Trained((), {VISION: ADAPTERS, TEXT: ADAPTERS}),
}


class Ours:
    """A way through dhp's trainers: what is dealt out, and seconds and loss of a step."""

    def __init__(self, model: str, trained: Trained, data: Data):
        self.way = Way(model, trained, MICRO_BATCHES)
        self._dealer = BatchSharder(data.family, Collator(data.family, 0, packing=True))

    def shard(self, samples: MicroBatches) -> Any:
        """What other processes do ahead of a step."""
        return self._dealer.shard(StepSamples(0, 0, tuple((row,) for row in samples), ()))

    def step(self, data: Any) -> tuple[float, float]:
        """Seconds and loss of a whole step."""
        taken = self.way.step(data)
        return taken.seconds, taken.loss


def add_peft(model: nn.Module, family: Family, trained: Trained) -> nn.Module:
    """The plain model as peft's users get it: its own call, beside the matrices that ours has adapters beside."""
    from peft import LoraConfig, get_peft_model

    targets = [name for part, asked in trained.adapters.items() for name in _targets(model, family, part, asked)]
    if not targets:
        return model
    return get_peft_model(model, LoraConfig(r=ADAPTERS.rank, lora_alpha=int(ADAPTERS.alpha), target_modules=targets))


def _targets(model: nn.Module, family: Family, part: str, asked: AdapterSettings) -> tuple[str, ...]:
    return find_targets(model, family.parts[part], asked)


def measure(rounds: int, even: bool = False) -> Iterator[dict[str, Any]]:
    """A row for each way, after one round that does not count. even: samples of one length. Raises AssertionError where
    first losses differ, or where bytes are kept for what is not trained."""
    with tempfile.TemporaryDirectory() as folder, join_alone():
        model = save_model(MODEL, Path(folder))
        data = Data(model, even)
        ours = {train: Ours(model, trained, data) for train, trained in TRAINED.items()}
        plain = {
            train: Plain(model, data, partial(add_peft, family=data.family, trained=trained))
            for train, trained in TRAINED.items()
        }
        taken = [_round(number, data.step(number), ours, plain) for number in range(rounds + 1)]
        for train, one in ours.items():
            require_bytes(train, one.way.stages)
        for train in TRAINED:
            yield _row(train, ours[train].way, plain[train], taken[1:])


def _round(number: int, samples: MicroBatches, *sides: Mapping[str, Ours | Plain]) -> list[dict[str, float]]:
    """Seconds by way, of each side; first losses are compared."""
    order = [(side, train) for train in TRAINED for side in range(len(sides))]
    seconds: list[dict[str, float]] = [{} for _ in sides]
    losses = []
    # Every other round the other way around: who comes first finds the caches of another.
    for side, train in order if number % 2 else order[::-1]:
        way: Any = sides[side][train]
        seconds[side][train], loss = way.step(way.shard(samples))
        losses.append(loss)
    if number == 0 and max(losses) / min(losses) - 1 > CLOSE:
        raise AssertionError(f"losses before any update differ: {losses}")
    return seconds


def _row(train: str, way: Way, plain: Plain, taken: Sequence[Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Seconds of rounds by side: ours, the plain loop's."""
    stages = way.stages.values()
    of_plain = sum(weight.nbytes for weight in plain.model.parameters() if weight.requires_grad)
    return {
        "train": train,
        "speed_ratio": round(median(ours[FULL] / ours[train] for ours, _ in taken), 3),
        "to_plain": round(median(ours[train] / theirs[train] for ours, theirs in taken), 3),
        "step_s": round(median(ours[train] for ours, _ in taken), 4),
        "plain_step_s": round(median(theirs[train] for _, theirs in taken), 4),
        "gradient_bytes": sum(stage.gradient_bytes for stage in stages),
        "optimizer_bytes": sum(stage.optimizer_bytes() for stage in stages),
        "plain_optimizer_bytes": STATES * of_plain,
        "rounds": len(taken),
    }
