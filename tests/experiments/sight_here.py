"""The quick form: both parts in this process, without actors, and one kind of question."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dhp.batch.reader import BatchReader, make_reader
from dhp.config.command_line import compose_config
from dhp.core.batch import StepData
from dhp.engine.encoder_engine import EncoderEngine
from dhp.engine.stage_settings import OptimizerSettings
from dhp.engine.text_engine import TextEngine
from dhp.models.registry import load_family
from dhp.plan.batches import feed_settings
from dhp.trainer.preflight import prepare
from experiments.pair import TEXT, VISION, join_alone, pair_of, settings_of
from experiments.sight.__main__ import CONFIG
from experiments.sight.datasets import Sets


class Pair:
    """A rank of each part, on the micro-batches of one reader after another."""

    def __init__(self, model: Path, update: OptimizerSettings):
        graph = pair_of(load_family(str(model)))
        self._vision = EncoderEngine(settings_of(graph, VISION, str(model), update))
        self._text = TextEngine(settings_of(graph, TEXT, str(model), update))

    def step(self, data: StepData) -> None:
        """An optimizer step on a step's micro-batches."""
        work, info = data.work, data.info
        last = len(work[VISION]) - 1
        for number in range(last + 1):
            sent = self._vision.forward_step(number, 0, work[VISION][number][0])
            self._text.forward_step(number, 0, work[TEXT][number][0], *sent)
            back = self._text.backward_step(number, 0, number == last)
            self._vision.backward_step(number, 0, number == last, *back)
        of_vision, of_text = self._vision.grad_norm_sq(info), self._text.grad_norm_sq(info)
        self._vision.optimizer_step(info, of_text)
        self._text.optimizer_step(info, of_vision)

    def right(self, data: StepData) -> tuple[int, int]:
        """Of a step's target tokens, those with the highest logit, and all."""
        for number in range(len(data.work[VISION])):
            sent = self._vision.evaluate_step(number, 0, data.work[VISION][number][0])
            self._text.evaluate_step(number, 0, data.work[TEXT][number][0], *sent)
        self._vision.evaluated(data.info)
        share = self._text.evaluated(data.info)
        return share.right, share.targets


def shares(model: Path, sets: Sets, steps: int, batch: int) -> dict[str, float]:
    """Train so many steps; the share of right target tokens of held-out questions with pictures right and exchanged."""
    update = OptimizerSettings(2e-3, (0.9, 0.95), 1e-8, 0.01, "linear", steps // 20, steps, 1.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with join_alone():
            pair = Pair(model, update)
            _train(pair, _reader(model, sets, "seen", batch), steps)
            return {which: _share(pair, _reader(model, sets, which, batch)) for which in ("right", "exchanged")}
    finally:
        torch.set_num_threads(threads)


def _train(pair: Pair, reader: BatchReader, steps: int) -> None:
    for number in range(steps):
        pair.step(reader.step(number))


def _share(pair: Pair, reader: BatchReader) -> float:
    counts = [pair.right(reader.step(number)) for number in range(reader.steps(1))]
    return sum(right for right, _ in counts) / sum(targets for _, targets in counts)


def _reader(model: Path, sets: Sets, dataset: str, batch: int) -> BatchReader:
    sizes = [f"training.batch_size={batch}", f"training.micro_batch_size={batch}", "training.max_steps=100"]
    given: Sequence[Any] = [
        *sets.registry(),
        *sizes,
        f"vision.model_name={model}",
        f"text.model_name={model}",
        f"data.datasets=[{dataset}]",
        "data.eval_datasets=[]",
        f"run_dir={sets.folder / 'read'}",
    ]
    return make_reader(feed_settings(prepare(compose_config(CONFIG.stem, str(CONFIG.parent), list(given)))))
