"""Measures seconds of all-reduces and hand-overs between processes."""

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dhp.cluster.host import GLOO, NCCL, keep_freed_memory
from dhp.cluster.transport.shared_memory import Inbox, Outbox
from dhp.core.errors import ClusterError

SIZES = (1 << 18, 1 << 25)  # bytes: where the latency counts, and where it does not
RUNS = 25
SIDE = 512  # of a square matrix that is multiplied between sums
_LEAST_S = 1e-6
TIMEOUT_S = 60.0

Pairs = tuple[tuple[int, float], ...]  # (bytes, seconds)


@dataclass(frozen=True)
class LinkSeconds:
    """Wall time by bytes. sums: of all-reduces; None where this machine has one GPU. handovers: of tensors from one
    process to another."""

    sums: Pairs | None
    handovers: Pairs


def measure_links(device: str, threads: int, sizes: Sequence[int] = SIZES) -> LinkSeconds:
    """Between two processes with so many threads each. device: cpu, whose sums are gloo's, or cuda: NCCL's, where there
    are two GPUs. Raises ClusterError where one of the processes fails or does not answer."""
    context = multiprocessing.get_context("spawn")
    with TemporaryDirectory(prefix="dhp-") as folder:
        pairs = [context.Pipe() for _ in range(2)]
        there, back = context.Pipe(), context.Pipe()
        ends = [(there[1], back[0]), (back[1], there[0])]  # of each process: to send by, to receive by
        peers = [
            context.Process(
                target=_run, args=(rank, f"{folder}/store", device, threads, tuple(sizes), *ends[rank], pairs[rank][1])
            )
            for rank in range(2)
        ]
        for peer in peers:
            peer.daemon = True
            peer.start()
        for other in (*there, *back, *(pair[1] for pair in pairs)):
            other.close()  # the processes have their own, so that the end of one is seen by the other
        try:
            found = [_answer(pair[0]) for pair in pairs]
        finally:
            for peer in peers:
                peer.join(1.0)
                peer.kill()
    return found[0]


def _answer(connection: Connection) -> LinkSeconds:
    with closing(connection):
        try:
            found = connection.recv() if connection.poll(TIMEOUT_S) else f"no answer in {TIMEOUT_S:.0f} s"
        except (EOFError, OSError):
            found = "it ended before it answered"
    if isinstance(found, LinkSeconds):
        return found
    raise ClusterError(
        f"measuring what two processes of this machine send each other failed: {found}. See that sockets on the "
        "loopback interface are allowed here, or plan with the rates of a known device: device=NAME"
    )


def _run(
    rank: int,
    store: str,
    device: str,
    threads: int,
    sizes: tuple[int, ...],
    sends: Connection,
    receives: Connection,
    answers: Connection,
) -> None:
    """One of the processes."""
    try:
        torch.set_num_threads(threads)
        keep_freed_memory()
        own = torch.device(device, rank % torch.cuda.device_count()) if device == "cuda" else torch.device(device)
        handovers = [(size, _handover(rank, own, size, sends, receives)) for size in sizes]
        answers.send(LinkSeconds(_sums(rank, Path(store), own, sizes), tuple(handovers)))
    except Exception as error:  # all of it is the other side's to report
        answers.send(f"{type(error).__name__}: {str(error)[:300]}")


def _sums(rank: int, store: Path, device: torch.device, sizes: Sequence[int]) -> Pairs | None:
    if device.type == "cuda" and torch.cuda.device_count() < 2:
        return None
    os.environ |= {GLOO: "lo", NCCL: "=lo"}
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout, on = timedelta(seconds=TIMEOUT_S), device if device.type == "cuda" else None
    opened = dist.FileStore(str(store), 2)
    dist.init_process_group(backend, store=opened, rank=rank, world_size=2, timeout=timeout, device_id=on)
    try:
        computing = _computing(device)
        return tuple((size, _beside(_sum_of(size, device), computing, device)) for size in sizes)
    finally:
        dist.destroy_process_group()


def _sum_of(size: int, device: torch.device) -> Callable[[], Any]:
    values = torch.zeros(size // 4, device=device)
    return lambda: dist.all_reduce(values)


def _computing(device: torch.device) -> Callable[[], Any]:
    """What ranks of a CPU do between two sums, some milliseconds; on GPUs nothing, which do it while they send."""
    if device.type == "cuda":
        return lambda: None
    left, right = torch.rand(SIDE, SIDE), torch.rand(SIDE, SIDE)
    return lambda: left @ right


def _beside(run: Callable[[], Any], computing: Callable[[], Any], device: torch.device) -> float:
    """Wall time that a run adds where both processes compute before each: the one that is later is waited for."""

    def both() -> None:
        computing()
        run()

    return max(_LEAST_S, _median(both, device) - _median(computing, device))


def _handover(rank: int, device: torch.device, size: int, sends: Connection, receives: Connection) -> float:
    """Of a tensor from the first process to the second, until that one has it on its device; with a word back."""
    on_gpu = device.type == "cuda"
    outbox, inbox = Outbox(pinned=on_gpu), Inbox(pinned=on_gpu)
    values = torch.zeros(size // 4, device=device)

    def send() -> None:
        sends.send(outbox.send(values))
        outbox.flush()
        receives.recv()
        outbox.end_step()

    def receive() -> None:
        received: Tensor = inbox.open(receives.recv())
        received.to(device)
        _wait(device)
        sends.send(None)

    return _median(receive if rank else send, device)


def _median(run: Callable[[], Any], device: torch.device) -> float:
    """Wall time of one run, behind two that do not count."""
    found = []
    for _ in range(2 + RUNS):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        found.append(time.perf_counter() - start)
    return median(found[2:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
