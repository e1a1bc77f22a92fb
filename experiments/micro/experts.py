"""Experts shared out among two replicas, against experts cut over two tensor ranks."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch.distributed as dist
from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration, Qwen3MoeConfig

from dhp.core.axes import Degrees
from dhp.core.batch import IGNORED, StepData
from dhp.core.reports import StageReport
from dhp.core.tracing import ALL_REDUCE, ALL_TO_ALL
from dhp.data.sample.sample import Sample
from dhp.engine.settings import OptimizerSettings
from dhp.engine.text import TextEngine
from dhp.models.registry import load_family
from experiments.pair import TEXT, pair_of, settings_of
from experiments.ranks import on_ranks
from experiments.small import deal

SIZES = {"hidden_size": 256, "moe_intermediate_size": 256, "num_experts": 8, "num_experts_per_tok": 2}
SIZES |= {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
SIZES |= {"intermediate_size": 512, "vocab_size": 512}


def make_model(folder: Path, **sizes: int) -> Path:
    """A LLaVA with random weights and a decoder with experts; its tower is as small as may be."""
    vision = CLIPVisionConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    config = LlavaConfig(text_config=Qwen3MoeConfig(**SIZES | sizes), vision_config=vision, image_token_index=505)
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    return folder


def compare(rounds: int, tokens: int, **sizes: int) -> list[dict[str, Any]]:
    """A row for each layout; tokens: of each sample."""
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_model(Path(folder) / "model", **sizes))
        found: list[dict[str, Any]] = on_ranks(RANKS, _measure, model, tokens, rounds)
    return found


RANKS, MICRO_BATCHES, SAMPLES = 2, 2, 8
TENSOR = "tensor 2"
WAYS = {TENSOR: Degrees(tensor=RANKS), "expert 2": Degrees(data=RANKS, expert=RANKS), "data 2": Degrees(data=RANKS)}
UPDATE = OptimizerSettings(1e-4, (0.9, 0.999), 1e-8, 0.0, "constant", 0, 1000, None)


@dataclass(frozen=True)
class Way:
    """A layout of the decoder on this rank, and its share of the step's data."""

    trainer: TextEngine
    data: StepData
    replica: int

    def step(self) -> tuple[float, StageReport]:
        """Seconds of a whole step, from the moment when all ranks begin it, and what the rank tells."""
        dist.barrier()
        begin = time.perf_counter()
        for number, row in enumerate(self.data.work[TEXT]):
            self.trainer.forward_step(number, 0, row[self.replica])
            self.trainer.backward_step(number, 0, number == MICRO_BATCHES - 1)
        self.trainer.grad_norm_sq(self.data.info)
        report = self.trainer.optimizer_step(self.data.info)
        dist.barrier()
        return time.perf_counter() - begin, report

    def expert_bytes(self) -> int:
        """Of this rank's experts."""
        named = self.trainer.model.named_parameters()
        return sum(parameter.nbytes for name, parameter in named if ".experts." in name)


def make_samples(tokens: int) -> list[Sample]:
    """Text alone, of one length: the tower would be the same in all layouts."""
    found, rng = [], np.random.default_rng(0)
    for number in range(SAMPLES):
        ids = rng.integers(3, 300, tokens)
        labels = np.where(np.arange(tokens) < tokens // 2, IGNORED, ids)
        found.append(Sample("made", number, ids, labels, np.zeros(tokens, dtype=np.int64), (), (), ()))
    return found


def make_way(model: str, split: Degrees, samples: list[Sample]) -> Way:
    """Load the decoder, cut so."""
    graph = pair_of(load_family(model), text=split)
    trainer = TextEngine(settings_of(graph, TEXT, model, UPDATE))
    data = deal(model, Degrees(), split, samples, MICRO_BATCHES)
    return Way(trainer, data, dist.get_rank() // split.tensor)


def _measure(model: str, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """One rank: rounds that visit all ways in turn, every other round the other way around, the first left out."""
    samples = make_samples(tokens)
    ways = {name: make_way(model, split, samples) for name, split in WAYS.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    reports: dict[str, StageReport] = {}
    for number in range(rounds + 1):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            seconds, reports[name] = ways[name].step()
            times[name].append(seconds)
    return [_row(name, way, times, reports[name].sent_bytes, tokens) for name, way in ways.items()]


def _row(name: str, way: Way, times: Mapping[str, list[float]], sent: Mapping[str, int], tokens: int) -> dict[str, Any]:
    pairs = list(zip(times[name][1:], times[TENSOR][1:], strict=True))
    return {
        "text": name, "step_ratio": round(median(own / tensor for own, tensor in pairs), 3),
        "step_s": round(median(own for own, _ in pairs), 4), "all_reduce_mb": round(sent.get(ALL_REDUCE, 0) / 1e6, 2),
        "all_to_all_mb": round(sent.get(ALL_TO_ALL, 0) / 1e6, 2), "expert_mb": round(way.expert_bytes() / 1e6, 2),
        "tokens": tokens * SAMPLES, "rounds": len(pairs),
    }  # fmt: skip
