"""Ranks of a part as plain gloo processes: what the cluster's actors run, without Ray.

Processes come from one fork server that has the imports done (tests/helpers/warm.py): a rank costs a fork, a twentieth
of a second, not five seconds. Each group has new ones. Ranks that served another group before would start no faster
worth speaking of, and compute with what that group left in torch's and transformers' caches."""

from __future__ import annotations

import gc
import multiprocessing as mp
import os
import pickle
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import count
from multiprocessing.connection import wait
from typing import Any

from dhp.cluster.host import LOOPBACK, open_listener
from dhp.core.dispatch import PerRank, spread
from dhp.step.stages import RankGroup

WARM = ("tests.helpers.warm", "tests.helpers.layouts")  # the second imports Ray, which no rank uses
TIMEOUT_S = 600
AGREE_S = 30  # until a rank that waits for another one's collective gives up
_GROUPS = count()


def context() -> Any:
    """The fork server's context, imports preloaded."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
    server = mp.get_context("forkserver")
    server.set_forkserver_preload(list(WARM))
    return server


class LocalGroup(RankGroup):
    """`size` processes with one trainer each; calls run on all of them at once and return values.

    checked: ranks agree on each collective before it begins."""

    def __init__(self, factory: Callable[..., Any], size: int, *arguments: Any, checked: bool = False):
        self.size = size
        self._ranks = [_start() for _ in range(size)]
        place = (_store().port, f"group {next(_GROUPS)}", size, AGREE_S if checked else 0)
        for number, rank in enumerate(self._ranks):
            try:
                rank.send(("join", (*place, number, factory, arguments)))
            except BaseException:
                self.close()
                raise
        self._gather()

    def execute_all_async(
        self, method: str | Callable[..., Any], *arguments: Any, returns: int | PerRank = 1
    ) -> list[list[Any]]:
        """As `dhp.step.stages.RankGroup`, with values for refs."""
        method = method if isinstance(method, str) else method.__name__
        results = self.execute_all(method, *arguments)
        counts = spread((returns,), self.size)
        return [
            [] if count == 0 else [result] if count == 1 and not isinstance(result, tuple) else list(result)
            for result, (count,) in zip(results, counts, strict=True)
        ]

    def execute_all(self, method: str, *arguments: Any) -> list[Any]:
        """The result of each rank, in rank order."""
        for rank, given in zip(self._ranks, spread(arguments, self.size), strict=True):
            rank.send((method, given))
        return self._gather()

    def close(self) -> None:
        """End the processes, whatever they do."""
        for rank in self._ranks:
            rank.end()
        self._ranks = []

    def __enter__(self) -> LocalGroup:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _gather(self) -> list[Any]:
        """The answer of each rank. The first error ends all: the others may wait for that rank for ever."""
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + TIMEOUT_S
        while len(answers) < len(self._ranks):
            pipes = {rank.pipe: number for number, rank in enumerate(self._ranks) if number not in answers}
            ready = wait(list(pipes), max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise TimeoutError(f"rank {min(pipes.values())} gave no answer within {TIMEOUT_S} s")
            for pipe in ready:
                number = pipes[pipe]
                try:
                    kind, value = self._ranks[number].receive()
                except (EOFError, OSError):
                    kind, value = "error", self._ranks[number].how_it_ended()
                if kind == "error":
                    self.close()
                    raise RuntimeError(f"rank {number}: {value}")
                answers[number] = value
        return [answers[number] for number in range(len(self._ranks))]


@dataclass(eq=False)
class _Rank:
    """A process, and the pipe to it."""

    process: Any
    pipe: Any

    def send(self, value: Any) -> None:
        # By value: torch's sharing of tensors between processes leaves a helper process behind for each that is killed.
        self.pipe.send_bytes(pickle.dumps(value))

    def receive(self) -> Any:
        return pickle.loads(self.pipe.recv_bytes())

    def how_it_ended(self) -> str:
        self.process.join(5)
        return f"the process ended with status {self.process.exitcode}"  # a signal's number below 0

    def end(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _start() -> _Rank:
    ours, theirs = context().Pipe()
    process = context().Process(target=_serve, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return _Rank(process, ours)


@cache
def _store() -> Any:
    """The store that the ranks of all groups of this process meet in."""
    import torch.distributed as dist

    listener = open_listener(LOOPBACK)
    port, handed = listener.getsockname()[1], listener.detach()
    return dist.TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, master_listen_fd=handed)


class _Caller:
    """What `run_on_ranks` serves: a plain function call."""

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


def run_on_ranks(function: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
    """`function(*arguments)` on `size` gloo ranks at once; the result of each. PerRank arguments spread."""
    with LocalGroup(_Caller, size) as group:
        return group.execute_all("call", function, *arguments)


def _serve(pipe: Any) -> None:
    """One rank's process: joins a group, serves its calls."""
    import torch

    gc.freeze()  # what the fork server imported is no garbage; DeepSpeed's collections took a second to look through it
    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = "0"
    target = None
    while True:
        try:
            method, given = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            if method == "join":
                target, answer = _join(*given), None
            else:
                answer = getattr(target, method)(*given)
            pipe.send_bytes(pickle.dumps(("value", answer)))
        except BaseException:
            pipe.send_bytes(pickle.dumps(("error", traceback.format_exc())))


def _join(
    port: int,
    prefix: str,
    size: int,
    agree_s: float,
    rank: int,
    factory: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> Any:
    import torch.distributed as dist

    from dhp.core.collectives import RECORD
    from dhp.parallel.traffic import count_collectives

    store = dist.PrefixStore(prefix, dist.TCPStore(LOOPBACK, port, wait_for_workers=False))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    if agree_s:
        count_collectives()
        RECORD.check(dist.PrefixStore("checks", store), agree_s)
    return factory(*arguments)
