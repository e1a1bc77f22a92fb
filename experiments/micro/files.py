"""What saving costs a step, beside torch's distributed checkpoint."""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from dhp.core.parameters import Group
from dhp.engine.saving import ShareSaver
from dhp.parallel.optim.base import make_adamw
from dhp.parallel.optim.replicated import Replicated
from experiments.pair import join_alone

WIDTH = 1024
STATES = ("exp_avg", "exp_avg_sq")


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
