"""Ranks of a part as plain gloo processes: what the cluster's actors run, without Ray.

Processes come from one fork server that has the imports done (tests/helpers/warm.py): a rank costs a fork, not five
seconds.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

from dhp.cluster.dispatch import PerRank, spread
from dhp.step.stages import Group

WARM = "tests.helpers.warm"
TIMEOUT_S = 240


def context() -> Any:
    """The fork server's context, imports preloaded."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("DEEPSPEED_LOG_LEVEL", "error")
    server = mp.get_context("forkserver")
    server.set_forkserver_preload([WARM])
    return server


class LocalGroup(Group):
    """`size` processes with one trainer each; calls run on all of them at once and return values."""

    def __init__(self, factory: Callable[..., Any], size: int, *arguments: Any):
        self.size = size
        self._folder = tempfile.TemporaryDirectory()
        store = os.path.join(self._folder.name, "store")
        self._pipes, self._processes = [], []
        for rank in range(size):
            ours, theirs = context().Pipe()
            given = (theirs, store, rank, size, factory, arguments)
            process = context().Process(target=_serve, args=given, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)
        self._gather()

    def execute_all_async(
        self, method: str | Callable[..., Any], *arguments: Any, returns: int | PerRank = 1
    ) -> list[list[Any]]:
        """As `dhp.step.stages.Group`, with values for refs."""
        method = method if isinstance(method, str) else method.__name__
        for pipe, given in zip(self._pipes, spread(arguments, self.size), strict=True):
            _send(pipe, (method, given))
        counts = spread((returns,), self.size)
        return [
            [] if count == 0 else [result] if count == 1 and not isinstance(result, tuple) else list(result)
            for result, (count,) in zip(self._gather(), counts, strict=True)
        ]

    def execute_all(self, method: str, *arguments: Any) -> list[Any]:
        """The result of each rank, in rank order."""
        for pipe, given in zip(self._pipes, spread(arguments, self.size), strict=True):
            _send(pipe, (method, given))
        return self._gather()

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def __enter__(self) -> LocalGroup:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _gather(self) -> list[Any]:
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(TIMEOUT_S):
                raise TimeoutError(f"rank {rank} gave no answer within {TIMEOUT_S} s")
            kind, value = _receive(pipe)
            if kind == "error":
                raise RuntimeError(f"rank {rank}: {value}")
            answers.append(value)
        return answers


class _Caller:
    """What `run_on_ranks` serves: a plain function call."""

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return function(*arguments)


def run_on_ranks(function: Callable[..., Any], size: int, *arguments: Any) -> list[Any]:
    """`function(*arguments)` on `size` gloo ranks at once; the result of each. PerRank arguments spread."""
    with LocalGroup(_Caller, size) as group:
        return group.execute_all("call", function, *arguments)


def _send(pipe: Any, value: Any) -> None:
    # By value: torch's sharing of tensors between processes leaves a helper process behind for each that is killed.
    pipe.send_bytes(pickle.dumps(value))


def _receive(pipe: Any) -> Any:
    return pickle.loads(pipe.recv_bytes())


def _serve(
    pipe: Any, store: str, rank: int, size: int, factory: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["LOCAL_RANK"] = "0"
    try:
        dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
        target = factory(*arguments)
        _send(pipe, ("value", None))
    except BaseException:
        _send(pipe, ("error", traceback.format_exc()))
        return
    while True:
        try:
            method, given = _receive(pipe)
        except EOFError:
            return
        try:
            _send(pipe, ("value", getattr(target, method)(*given)))
        except BaseException:
            _send(pipe, ("error", traceback.format_exc()))
