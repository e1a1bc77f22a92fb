"""One rank of the comparison. A module of its own, because processes that are spawned import it by name."""

from __future__ import annotations

import os
import time
from multiprocessing.queues import SimpleQueue
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from dhp.parallel.attention.segment_plan import MeshPosition, plan_shard
from dhp.parallel.attention.segments import attend_segments
from dhp.parallel.attention.shard_plan import contiguous_plan

HEADS, DIM = 4, 32


def measure(rank: int, ranks: int, store: str, sizes: list[int], rounds: int, answers: SimpleQueue) -> None:
    """Interleaved rounds of both variants, forward and backward, one image over all ranks."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    position = MeshPosition(rank, dist.group.WORLD, 0, dist.new_subgroups(1)[0])
    for tokens in sizes:
        shards = contiguous_plan([tokens], ranks, 1)
        plans = {gather: plan_shard(shards, position, torch.device("cpu"), gather=gather) for gather in (False, True)}
        times: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(rounds + 1):
            for gather, plan in plans.items():
                states = [torch.randn(tokens // ranks, HEADS, DIM, requires_grad=True) for _ in range(3)]
                dist.barrier()
                begin = time.perf_counter()
                attend_segments(*states, plan, DIM**-0.5).sum().backward()
                dist.barrier()
                times[gather].append(time.perf_counter() - begin)
        if rank == 0:
            answers.put(_row(tokens, ranks, times))
    dist.barrier()  # the others may still need this rank
    dist.destroy_process_group()


def _row(tokens: int, ranks: int, times: dict[bool, list[float]]) -> dict[str, Any]:
    ring, gather = times[False][1:], times[True][1:]
    return {
        "ring": ranks,
        "tokens": tokens,
        "ring_s": round(median(ring), 5),
        "gather_s": round(median(gather), 5),
        "ratio": round(median(g / r for g, r in zip(gather, ring, strict=True)), 3),
        "rounds": len(ring),
    }
