"""Files: what saving costs a step beside torch's distributed checkpoint, and a large JSONL file before training."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from dhp.core.parameters import Group
from dhp.data.read.annotations import read_annotations
from dhp.data.sampling.sampler import epoch_order
from dhp.engine.saving import ShareSaver
from dhp.parallel.optim.base import make_adamw
from dhp.parallel.optim.replicated import Replicated
from experiments.pair import join_alone

WIDTH = 1024
STATES = ("exp_avg", "exp_avg_sq")
BATCH, READS = 50_000, 2_000  # lines that are written at once, and samples that are read


@dataclass(frozen=True)
class Saved:
    """stall_s: until the caller may change what is saved; done_s: until it is on the disk."""

    stall_s: float
    done_s: float


def checkpoint(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row of medians over the rounds, without each way's first save, in which memory is new."""
    torch.set_num_threads(1)
    with join_alone(), tempfile.TemporaryDirectory() as folder:
        yield {"kind": "save"} | measure_saving(given.mb, given.rounds or 5, Path(folder))


def measure_saving(megabytes: int, rounds: int, parent: Path) -> dict[str, Any]:
    """Seconds of dhp's own save of a rank and of torch's, in turn, each waiting and in the background."""
    module, optimizer = make_state(megabytes)
    state = state_dict(module, optimizer)
    saver = ShareSaver(0, 0, True, True, {}, None, pinned=False)
    options = dict.fromkeys(
        ("use_pinned_memory", "use_shared_memory", "use_async_staging", "use_non_blocking_copy"), False
    )
    stager = DefaultStager(StagingOptions(**options))
    ways: dict[str, Callable[[Path], Saved]] = {
        "dhp": lambda folder: save_share(saver, optimizer, folder, False),
        "dhp_background": lambda folder: save_share(saver, optimizer, folder, True),
        "torch": lambda folder: save_torch(state, folder, None),
        "torch_async": lambda folder: save_torch(state, folder, stager),
    }
    found: dict[str, list[Saved]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, save in ways.items():
            folder = parent / f"{name}-{number}"
            folder.mkdir()
            found[name].append(save(folder))
            shutil.rmtree(folder)
    row: dict[str, Any] = {"mb": round(sum(t.nbytes for t in state.values()) / 1e6)}
    for name, saves in found.items():
        row |= {f"{name}_stall_s": round(median(one.stall_s for one in saves[1:]), 3)}
        row |= {f"{name}_done_s": round(median(one.done_s for one in saves[1:]), 3), f"{name}_first": asdict(saves[0])}
    row["done_ratio"] = round(row["dhp_done_s"] / row["torch_done_s"], 2)
    row["stall_ratio"] = round(row["dhp_background_stall_s"] / row["torch_async_stall_s"], 2)
    row["background_done_ratio"] = round(row["dhp_background_done_s"] / row["torch_async_done_s"], 2)
    return row


def make_state(megabytes: int) -> tuple[nn.Module, Replicated]:
    """A module, and its optimizer after one step: weights and both moments together so many megabytes."""
    layers = max(1, round(megabytes * 1e6 / (3 * 4 * WIDTH * WIDTH)))
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    group = Group("all", 1e-3, 0.0, 0)
    make = lambda named: make_adamw(named, lambda _: group, (0.9, 0.999), 1e-8)
    optimizer = Replicated(module, make, dist.group.WORLD)
    optimizer.backward(module(torch.randn(4, WIDTH)).square().mean(), last=True)
    optimizer.norm_sq()
    optimizer.step({"all": 1e-3}, 1.0)
    return module, optimizer


def state_dict(module: nn.Module, optimizer: Replicated) -> dict[str, Tensor]:
    """The same tensors, as torch's checkpoint takes them."""
    found = {name: weight.detach() for name, weight in module.named_parameters()}
    for name, master in zip(optimizer._names, optimizer._masters, strict=True):
        found |= {f"{name}.{kind}": optimizer.optimizer.state[master][kind] for kind in STATES}
    return found


def save_share(saver: ShareSaver, optimizer: Replicated, folder: Path, background: bool) -> Saved:
    """dhp's own save of a rank."""
    begun = time.perf_counter()
    saver.save(optimizer, folder / "part", background)
    stall = time.perf_counter() - begun
    saved = saver.saved(wait=True)
    assert saved.error is None, saved.error
    done = time.perf_counter() - begun
    return Saved(stall if background else done, done)


def save_torch(state: dict[str, Tensor], folder: Path, stager: DefaultStager | None) -> Saved:
    """torch's distributed checkpoint, its files down to the disk. stager: of copies whose memory is kept, for a save
    behind the caller; None: it waits."""
    begun, stall = time.perf_counter(), None
    if stager is None:
        dcp.save(state, checkpoint_id=folder)
    else:
        future: Any = dcp.async_save(state, checkpoint_id=folder, async_stager=stager)
        if hasattr(future, "staging_completion"):
            future.staging_completion.result()
        stall = time.perf_counter() - begun
        (future.upload_completion if hasattr(future, "upload_completion") else future).result()
    for file in folder.iterdir():
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    done = time.perf_counter() - begun
    return Saved(done if stall is None else stall, done)


def jsonl_index(given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Seconds and memory of opening a file of so many samples of about 300 bytes, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for begin in range(0, given.lines, BATCH):
                file.writelines(_line(number) for number in range(begin, min(begin + BATCH, given.lines)))
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            yield pool.submit(open_lines, path).result()


def _line(number: int) -> str:
    talk = [
        {"from": "human", "value": f"<image>\nWhat is at the bottom of receipt {number}, and what does that mean?"},
        {"from": "gpt", "value": f"The total, {number % 9973} crowns." + " Thank you for your visit." * (number % 4)},
    ]
    return json.dumps({"id": number, "image": f"receipts/{number // 1000}/{number}.jpg", "conversations": talk}) + "\n"


def open_lines(path: Path) -> dict[str, float]:
    """Open the file as a run does, make the order of an epoch, read lines at random."""
    times, peaks = [time.perf_counter()], [_peak_mib()]
    annotations = read_annotations("set", path, path.parent)
    times.append(time.perf_counter())
    peaks.append(_peak_mib())
    order = epoch_order(len(annotations), 0, 0, True)
    times.append(time.perf_counter())
    for index in order[:READS]:
        annotations.record(int(index))
    opened, ordered, read = np.diff([*times, time.perf_counter()]).tolist()
    return {
        "lines": len(annotations),
        "file_mib": round(path.stat().st_size / 2**20, 1),
        "seconds": round(opened, 2),
        "order_s": round(ordered, 2),
        "us_a_record": round(read / min(READS, len(annotations)) * 1e6, 1),
        "rss_before_mib": round(peaks[0], 1),
        "peak_rss_opened_mib": round(peaks[1], 1),
        "peak_rss_mib": round(_peak_mib(), 1),
        "index_mib": round(len(annotations) * np.dtype(np.int64).itemsize / 2**20, 1),
    }


def _peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
