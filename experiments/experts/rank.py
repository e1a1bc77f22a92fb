"""One rank of the comparison. A module of its own, because processes that are spawned import it by name."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing.queues import SimpleQueue
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dhp.core.axes import Degrees
from dhp.core.batch import IGNORED, StepData
from dhp.core.reports import StageReport
from dhp.core.tracing import ALL_REDUCE, ALL_TO_ALL
from dhp.data.sample.sample import Sample
from dhp.engine.stage_settings import OptimizerSettings
from dhp.engine.text_engine import TextEngine
from dhp.models.registry import load_family
from experiments.pair import TEXT, pair_of, settings_of
from experiments.recompute.work import deal

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


def measure(rank: int, port: int, model: str, tokens: int, rounds: int, answers: SimpleQueue) -> None:
    """One rank: rounds that visit all ways in turn, every other round the other way around, the first left out."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // RANKS))
    store = dist.TCPStore("127.0.0.1", port, RANKS, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    samples = make_samples(tokens)
    ways = {name: make_way(model, split, samples) for name, split in WAYS.items()}
    times: dict[str, list[float]] = {name: [] for name in ways}
    reports: dict[str, StageReport] = {}
    for number in range(rounds + 1):
        for name in list(ways)[:: -1 if number % 2 else 1]:
            seconds, reports[name] = ways[name].step()
            times[name].append(seconds)
    if rank == 0:
        for name, way in ways.items():
            answers.put(_row(name, way, times, reports[name].sent_bytes, tokens))
    dist.barrier()  # rank 0 holds the store that the others need until they are gone
    dist.destroy_process_group()


def _row(name: str, way: Way, times: Mapping[str, list[float]], sent: Mapping[str, int], tokens: int) -> dict[str, Any]:
    pairs = list(zip(times[name][1:], times[TENSOR][1:], strict=True))
    return {
        "text": name,
        "step_ratio": round(median(own / tensor for own, tensor in pairs), 3),
        "step_s": round(median(own for own, _ in pairs), 4),
        "all_reduce_mb": round(sent.get(ALL_REDUCE, 0) / 1e6, 2),
        "all_to_all_mb": round(sent.get(ALL_TO_ALL, 0) / 1e6, 2),
        "expert_mb": round(way.expert_bytes() / 1e6, 2),
        "tokens": tokens * SAMPLES,
        "rounds": len(pairs),
    }
