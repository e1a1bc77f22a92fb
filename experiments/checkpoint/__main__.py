"""`python -m experiments.checkpoint [--mb N] [--rounds N]`: what saving costs a step, beside torch's distributed
checkpoint of the same state, and loading in another layout beside loading in the same one."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from dhp.checkpoint.shard_reader import ShardReader
from dhp.checkpoint.shard_writer import ShardWriter
from dhp.core.parameters import ParameterGroup
from dhp.engine.stage import ShareSaver
from dhp.parallel.optim.base import make_adamw
from dhp.parallel.optim.replicated import Replicated

WIDTH = 1024
STATES = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Saved:
    """stall_s: until the caller may change what is saved; done_s: until it is on the disk."""

    stall_s: float
    done_s: float


def make_state(megabytes: int) -> tuple[nn.Module, Replicated]:
    """A module, and its optimizer after one step: weights and both moments together so many megabytes."""
    layers = max(1, round(megabytes * 1e6 / (3 * 4 * WIDTH * WIDTH)))
    module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)))
    group = ParameterGroup("all", 1e-3, 0.0, 0)
    optimizer = Replicated(
        module, lambda named: make_adamw(named, lambda _: group, (0.9, 0.999), 1e-8), dist.group.WORLD
    )
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


def product(saver: ShareSaver, optimizer: Replicated, folder: Path, background: bool) -> Saved:
    """dhp's own save of a rank."""
    begun = time.perf_counter()
    saver.save(optimizer, folder / "part", background)
    stall = time.perf_counter() - begun
    saved = saver.saved(wait=True)
    assert saved.error is None, saved.error
    done = time.perf_counter() - begun
    return Saved(stall if background else done, done)


def torch_sync(state: dict[str, Tensor], folder: Path) -> Saved:
    """torch's distributed checkpoint, which waits."""
    begun = time.perf_counter()
    dcp.save(state, checkpoint_id=folder)
    _sync(folder)
    done = time.perf_counter() - begun
    return Saved(done, done)


def torch_async(state: dict[str, Tensor], folder: Path, stager: DefaultStager) -> Saved:
    """The same behind the caller, with memory for its copies that it keeps."""
    begun = time.perf_counter()
    future: Any = dcp.async_save(state, checkpoint_id=folder, async_stager=stager)
    if hasattr(future, "staging_completion"):
        future.staging_completion.result()
    stall = time.perf_counter() - begun
    (future.upload_completion if hasattr(future, "upload_completion") else future).result()
    _sync(folder)
    return Saved(stall, time.perf_counter() - begun)


def _sync(folder: Path) -> None:
    """Its files down to the disk, as dhp's are."""
    for file in folder.iterdir():
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def measure_saving(megabytes: int, rounds: int, parent: Path) -> dict[str, Any]:
    """Medians over the rounds, without each way's first save, in which memory is new."""
    module, optimizer = make_state(megabytes)
    state = state_dict(module, optimizer)
    saver = ShareSaver(0, 0, True, True, {}, None, pinned=False)
    stager = DefaultStager(StagingOptions(use_pinned_memory=False, use_shared_memory=False, use_async_staging=False,
                                          use_non_blocking_copy=False))  # fmt: skip
    ways: dict[str, Callable[[Path], Saved]] = {
        "dhp": lambda folder: product(saver, optimizer, folder, False),
        "dhp_background": lambda folder: product(saver, optimizer, folder, True),
        "torch": lambda folder: torch_sync(state, folder),
        "torch_async": lambda folder: torch_async(state, folder, stager),
    }
    found: dict[str, list[Saved]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, save in ways.items():
            folder = parent / f"{name}-{number}"
            folder.mkdir()
            found[name].append(save(folder))
            shutil.rmtree(folder)
    row: dict[str, Any] = {"kind": "save", "mb": round(sum(t.nbytes for t in state.values()) / 1e6)}
    for name, saves in found.items():
        later = saves[1:]
        row |= {f"{name}_stall_s": round(median(one.stall_s for one in later), 3)}
        row |= {f"{name}_done_s": round(median(one.done_s for one in later), 3), f"{name}_first": asdict(saves[0])}
    row["done_ratio"] = round(row["dhp_done_s"] / row["torch_done_s"], 2)
    row["stall_ratio"] = round(row["dhp_background_stall_s"] / row["torch_async_stall_s"], 2)
    row["background_done_ratio"] = round(row["dhp_background_done_s"] / row["torch_async_done_s"], 2)
    return row


Read = Callable[[ShardReader, str, int, tuple[int, int]], Tensor]


def _rows(reader: ShardReader, name: str, rank: int, shape: tuple[int, int]) -> Tensor:
    return reader.block(name, (rank * shape[0] // 2, 0), (shape[0] // 2, shape[1]))


def _columns(reader: ShardReader, name: str, rank: int, shape: tuple[int, int]) -> Tensor:
    return reader.block(name, (0, rank * shape[1] // 2), (shape[0], shape[1] // 2))


def _flat(reader: ShardReader, name: str, rank: int, shape: tuple[int, int]) -> Tensor:
    half = shape[0] * shape[1] // 2
    return reader.flat(name, rank * half, half)


LAYOUTS: dict[str, Read] = {"rows": _rows, "columns": _columns, "flat ranges": _flat}


def write_layout(layout: str, tensors: dict[str, Tensor], folder: Path) -> None:
    """Two ranks' files, as a layout cuts their tensors."""
    for rank in range(2):
        writer = ShardWriter(folder, rank)
        for name, whole in tensors.items():
            shape = (whole.shape[0], whole.shape[1])
            if layout == "flat ranges":
                half = whole.numel() // 2
                writer.add_flat(name, whole.view(-1)[rank * half : (rank + 1) * half], rank * half, shape)
            else:
                dim = 0 if layout == "rows" else 1
                offset = tuple(rank * shape[dim] // 2 if d == dim else 0 for d in range(2))
                writer.add_block(name, whole.chunk(2, dim)[rank], offset, shape)
        writer.write()


def measure_loading(megabytes: int, rounds: int, parent: Path) -> list[dict[str, Any]]:
    """Seconds in which two ranks, one after the other, read their shares; files are in the page cache."""
    count = max(1, round(megabytes * 1e6 / (4 * WIDTH * WIDTH)))
    tensors = {f"{n}.weight": torch.randn(WIDTH, WIDTH) for n in range(count)}
    for layout in LAYOUTS:
        write_layout(layout, tensors, parent / layout)
    seconds: dict[tuple[str, str], list[float]] = {(a, b): [] for a in LAYOUTS for b in LAYOUTS}
    for _ in range(rounds):
        for before, after in seconds:
            begun = time.perf_counter()
            for rank in range(2):
                reader = ShardReader(parent / before)
                for name in tensors:
                    LAYOUTS[after](reader, name, rank, (WIDTH, WIDTH))
            seconds[before, after].append(time.perf_counter() - begun)
    found = {pair: median(of) for pair, of in seconds.items()}
    return [
        {
            "kind": "load",
            "mb": round(count * 4 * WIDTH * WIDTH / 1e6),
            "written": before,
            "read": after,
            "seconds": round(found[before, after], 3),
            "ratio": round(found[before, after] / found[after, after], 2),
        }
        for before, after in found
        if before != after
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.checkpoint", description=__doc__)
    parser.add_argument("--mb", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where files are written and removed; by default a temporary one")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        rows = [measure_saving(arguments.mb, arguments.rounds, Path(folder))]
        rows += measure_loading(arguments.mb, arguments.rounds, Path(folder))
    for row in rows:
        print(json.dumps({"command": f"python -m experiments.checkpoint --mb {arguments.mb}"} | row))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
