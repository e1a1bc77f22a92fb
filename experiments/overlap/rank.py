"""One rank of the comparison. A module of its own, because processes that are spawned import it by name."""

from __future__ import annotations

import os
import time
from functools import partial
from multiprocessing.queues import SimpleQueue
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dhp.parallel.optim.replicated import Replicated

RANKS, LAYERS, WIDTH, ROWS = 2, 12, 1024, 512


def make_update(overlap: bool, dtype: torch.dtype) -> tuple[nn.Module, Replicated]:
    """A stack of linear layers, 50 MB of gradients, and its update."""
    torch.manual_seed(0)
    net = nn.Sequential(*(layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
    make = partial(torch.optim.AdamW, lr=1e-4)
    return net, Replicated(net, make, dist.group.WORLD, dtype, overlap)


def backward_s(net: nn.Module, update: Replicated, rows: torch.Tensor) -> float:
    """Seconds from the beginning of backward until all sums are there."""
    loss = net(rows).square().mean()
    dist.barrier()
    begin = time.perf_counter()
    update.backward(loss, last=True)
    elapsed = time.perf_counter() - begin
    update.drop()
    return elapsed


def measure(rank: int, port: int, rounds: int, answers: SimpleQueue) -> None:
    """One rank: interleaved rounds of both ways, the first of each left out."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // RANKS))
    store = dist.TCPStore("127.0.0.1", port, RANKS, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    for dtype in (torch.float32, torch.bfloat16):
        ways = {overlap: make_update(overlap, dtype) for overlap in (True, False)}
        rows = torch.randn(ROWS, WIDTH, dtype=dtype)
        times: dict[bool, list[float]] = {True: [], False: []}
        for _ in range(rounds + 1):
            for overlap, (net, update) in ways.items():
                times[overlap].append(backward_s(net, update, rows))
        if rank == 0:
            answers.put(_row(dtype, times, rounds))
    dist.barrier()  # rank 0 holds the store that the others need until they are gone
    dist.destroy_process_group()


def _row(dtype: torch.dtype, times: dict[bool, list[float]], rounds: int) -> dict[str, Any]:
    pairs = list(zip(times[True][1:], times[False][1:], strict=True))
    return {
        "dtype": str(dtype).removeprefix("torch."),
        "overlapped_s": median(o for o, _ in pairs),
        "after_s": median(a for _, a in pairs),
        "ratio": median(o / a for o, a in pairs),
        "megabytes": LAYERS * WIDTH * (WIDTH + 1) * 4 // 10**6,
        "ranks": RANKS,
        "rounds": rounds,
    }
