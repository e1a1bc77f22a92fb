"""`python -m experiments.overhead [--rounds N] [--micro-batches M]`: one actor a part against a plain loop."""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import ray
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForImageTextToText

from dhp.batch.reader import make_reader
from dhp.cluster.host import keep_freed_memory
from dhp.config.command_line import compose_config
from dhp.config.schema import Config
from dhp.core.batch import Batch
from dhp.core.graph import StageGraph
from dhp.engine.encoder_engine import EncoderEngine
from dhp.engine.stage_settings import StageSettings
from dhp.engine.text_engine import TextEngine
from dhp.plan.batches import feed_settings
from dhp.plan.run_plan import plan_run
from dhp.step.schedule import make_schedule
from dhp.step.stages import Stages
from dhp.step.step import train_step
from dhp.tiny.tiny_model import make_tiny_assets
from dhp.trainer.preflight import prepare
from dhp.trainer.settings import stage_settings
from experiments.pair import TEXT, VISION, as_batch
from experiments.small import grow, started, wait_for

TEXT_SIZE = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "vocab_size": 8192}
VISION_SIZE = {"hidden_size": 256, "intermediate_size": 704, "depth": 8, "fullatt_block_indexes": [3, 7]}
ENGINES = {VISION: EncoderEngine, TEXT: TextEngine}


def configure(folder: Path, micro_batches: int, more: Sequence[str] = ()) -> Config:
    """One actor a part, 16 samples a step. more: overrides that beat these."""
    make_tiny_assets(folder)
    grow(folder / "model", folder / "medium", TEXT_SIZE, VISION_SIZE)
    size = 16
    overrides = [
        f"tiny_assets={folder}", f"run_dir={folder / 'run'}",
        *(f"{part}.{key}" for part in ("vision", "text") for key in ("parallelism=none", "num_actors=1")),
        *(f"{part}.model_name={folder / 'medium'}" for part in ("vision", "text")), "vision.zero_stage=0",
        f"training.batch_size={size}", f"training.micro_batch_size={size // micro_batches}", "training.warmup_ratio=0",
        "data.min_pixels=40000", "data.max_pixels=60000", f"cluster.threads_per_actor={os.cpu_count()}", *more,
    ]  # fmt: skip
    return prepare(compose_config("tiny", overrides=overrides))


class Plain:
    """The usual loop in this process."""

    def __init__(self, model_name: str, lr: float):
        torch.set_num_threads(os.cpu_count() or 1)
        keep_freed_memory()  # as dhp's ranks do
        self.model = AutoModelForImageTextToText.from_pretrained(
            model_name, dtype=torch.float32, trust_remote_code=False
        ).train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)

    def step(self, micro_batches: list[dict[str, Tensor]]) -> float:
        """One optimizer step; the loss."""
        targets = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in micro_batches)
        total = 0.0
        for batch in micro_batches:
            inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
            logits = self.model(**inputs, use_cache=False).logits[:, :-1]
            loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum") / targets
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total


def graph_of(config: Config) -> StageGraph:
    """The configuration's stages."""
    return plan_run(config).graph


def settings_by_stage(config: Config, graph: StageGraph) -> dict[str, StageSettings]:
    """Of both stages, for `experiments.small.started`."""
    return {stage.name: stage_settings(config, graph, stage, "cpu", 1000) for stage in graph.stages}


def dhp_step(graph: StageGraph, stages: Stages, batch: Batch, micro_batches: int) -> float:
    """One step, waited for; the loss. batch: in the object store, as the dataset actor leaves it there."""
    refs = train_step(stages, make_schedule("sequential", graph, micro_batches), graph.ties, batch)
    wait_for(stage.group for stage in stages.values())
    return sum(report.loss for report in ray.get(refs.reports[TEXT]))


def measure(rounds: int, micro_batches: int) -> dict[str, Any]:
    """Interleaved rounds; the first of each is left out."""
    with tempfile.TemporaryDirectory() as name:
        config = configure(Path(name), micro_batches)
        feed = make_reader(feed_settings(config))
        plain = Plain(config.text.model_name, config.training.learning_rate)
        graph = graph_of(config)
        times: dict[str, list[float]] = {"hf": [], "dhp": []}
        with started(graph, ENGINES, settings_by_stage(config, graph), threads=os.cpu_count()) as stages:
            for step in range(rounds + 1):
                batch, named = (
                    as_batch(feed.step(step), ray.put),
                    _by_micro_batch(feed.model_inputs(step), micro_batches),
                )
                begin = time.perf_counter()
                theirs = plain.step(named)
                between = time.perf_counter()
                ours = dhp_step(graph, stages, batch, micro_batches)
                times["hf"].append(between - begin)
                times["dhp"].append(time.perf_counter() - between)
    hf_s, dhp_s = (median(times[kind][1:]) for kind in ("hf", "dhp"))
    ratio = median(d / h for d, h in zip(times["dhp"][1:], times["hf"][1:], strict=True))
    return {
        "hf_step_s": hf_s, "dhp_step_s": dhp_s, "ratio": ratio, "micro_batches": micro_batches, "rounds": rounds,
        "hf_loss": theirs, "dhp_loss": ours,
    }  # fmt: skip


def _by_micro_batch(named: dict[str, Tensor], micro_batches: int) -> list[dict[str, Tensor]]:
    return [
        {key.rpartition("/")[2]: tensor for key, tensor in named.items() if key.startswith(f"0/{m}/")}
        for m in range(micro_batches)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--micro-batches", type=int, default=1)
    given = parser.parse_args()
    print(json.dumps(measure(given.rounds, given.micro_batches)))


if __name__ == "__main__":
    main()
