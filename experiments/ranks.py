"""Processes that compute together on this host: gloo, one thread each, without Ray."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from transformers.utils import logging


def on_ranks(ranks: int, task: Callable[..., Any], *given: Any) -> Any:
    """What rank 0's `task(*given)` answers, when so many processes have run it together."""
    answers = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_run, (ranks, str(Path(folder) / "store"), task, given, answers), nprocs=ranks)
    return answers.get()


def _run(rank: int, ranks: int, store: str, task: Callable[..., Any], given: tuple[Any, ...], answers: Any) -> None:
    torch.set_num_threads(1)
    logging.disable_progress_bar()
    os.environ.update(LOCAL_RANK="0", RANK=str(rank), WORLD_SIZE=str(ranks), DS_ACCELERATOR="cpu")
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    found = task(*given)
    if rank == 0:
        answers.put(found)
    dist.barrier()  # the others may still need this rank
    dist.destroy_process_group()
