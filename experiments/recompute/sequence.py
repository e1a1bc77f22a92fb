"""Peak of a rank's activations when several ranks share one image, against one rank with all of it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from dhp.core.axes import Degrees
from dhp.core.batch import Bundle, VisionInput
from dhp.engine.encoder_engine import EncoderEngine
from experiments.pair import VISION
from experiments.recompute.layout import Layout
from experiments.recompute.work import deal, make_model, make_samples

TOWER, DECODER, LAYERS = 64, 64, 4
WORDS = 16
SHARED = {"ulysses": Degrees(ulysses=4), "ring": Degrees(ring=4), "ring × ulysses": Degrees(ring=2, ulysses=2)}


def measure(side: int, recompute: str = "none") -> Iterator[dict[str, Any]]:
    """A row for each way to share an image of side × side patches over four ranks."""
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), TOWER, DECODER, LAYERS)
        (alone,) = peaks(model, Degrees(), side, recompute)
        for name, degrees in SHARED.items():
            found = peaks(model, degrees, side, recompute)
            yield {
                "mode": "sequence",
                "patches": side * side,
                "recompute": recompute,
                "shared": name,
                "ranks": degrees.world,
                "of_a_share": round(max(found) * degrees.world / alone, 4),
                "alone_mib": round(alone / 2**20, 2),
                "fullest_mib": round(max(found) / 2**20, 2),
            }


def peaks(model: str, degrees: Degrees, side: int, recompute: str) -> list[int]:
    """Bytes, of every rank."""
    data = deal(model, degrees, Degrees(), make_samples(1, side, WORDS), 1)
    answers = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        given = (degrees, store, model, recompute, data.work[VISION][0], answers)
        multiprocessing.spawn(_work, given, nprocs=degrees.world)
    return [answers.get() for _ in range(degrees.world)]


def _work(
    rank: int,
    degrees: Degrees,
    store: str,
    model: str,
    recompute: str,
    works: tuple[VisionInput, ...],
    answers: SimpleQueue,
) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // degrees.world))
    dist.init_process_group("gloo", store=dist.FileStore(store, degrees.world), rank=rank, world_size=degrees.world)
    trainer = EncoderEngine(Layout(degrees).settings(VISION, model))
    trainer.set_recompute((recompute,) * LAYERS)
    (embeddings,) = trainer.forward_step(0, 0, works[rank])
    gradients = {name: torch.ones_like(tensor) for name, tensor in embeddings.tensors.items()}
    trainer.backward_step(0, 0, True, Bundle(gradients))
    usage = trainer.meter.take((recompute,) * LAYERS)
    answers.put(0 if usage is None else usage.peak_bytes)
    dist.barrier()  # the others may still need this rank
    dist.destroy_process_group()
