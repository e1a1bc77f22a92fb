"""Ranks of a stage: dhp's own `Worker`s in processes of their own on this host, without Ray.

Processes come from a fork server that has imported what they need and touched no GPU."""

from __future__ import annotations

import multiprocessing as mp
import pickle
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from dhp.cluster.transport import shared_memory
from dhp.core.dispatch import PerRank, spread
from dhp.core.graph import SHARED_MEMORY
from dhp.step.stages import RankGroup

WARM = "experiments.gpu_check.warm"
TIMEOUT_S = 100.0
SMALLEST_BYTES = 1  # whatever is handed over goes by the transport


class Ranks(RankGroup):
    """A group whose calls run on all ranks at once and return values. To be left as a context."""

    def __init__(
        self,
        stage: str,
        size: int,
        device: str,
        factory: Callable[..., Any],
        *arguments: Any,
        backend: str = "gloo",
        transport: str = SHARED_MEMORY,
    ):
        """factory(*arguments): the trainer of each rank, which finds the process group ready. Raises RuntimeError,
        with its traceback, for what a rank raises; TimeoutError for one that does not answer."""
        self.size, self._ranks = size, []
        server = mp.get_context("forkserver")
        server.set_forkserver_preload([WARM])
        try:
            for rank in range(size):
                ours, theirs = server.Pipe()
                process = server.Process(
                    target=_serve, args=(theirs, stage, rank, size, device, backend, transport), daemon=True
                )
                process.start()
                theirs.close()
                self._ranks.append((process, ours))
            address = self._ask([0], "listen", [()])[0]
            self._ask(range(size), "join", [address] * size)
            self._ask(range(size), "build", [(factory, arguments)] * size)
        except BaseException:
            self.close()
            raise

    def execute_all_async(
        self, method: str | Callable[..., Any], *arguments: Any, returns: int | PerRank = 1
    ) -> list[list[Any]]:
        """As `dhp.step.stages.RankGroup`, with values for refs."""
        name = method if isinstance(method, str) else method.__name__
        calls = [(((name, given),),) for given in spread(arguments, self.size)]
        return [list((answer or (None,))[1:]) for answer in self._ask(range(self.size), "call", calls)]

    def first(self, method: str, *arguments: Any) -> Any:
        """The first rank's first answer; None where it has none."""
        return next(iter(self.execute_all_async(method, *arguments)[0]), None)

    def spans(self) -> list[list[Any]]:
        """What each rank did since the last time (`dhp.core.tracing`)."""
        return self._ask(range(self.size), "take_spans", [()] * self.size)

    def close(self) -> None:
        """End the processes, whatever they do."""
        for process, pipe in self._ranks:
            process.kill()
            process.join()
            pipe.close()
        self._ranks = []

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _ask(self, ranks: Any, method: str, arguments: list[tuple[Any, ...]]) -> list[Any]:
        """Each one's answer. The first error ends all: others may wait for that rank for ever."""
        pipes = {self._ranks[rank][1]: rank for rank in ranks}
        for pipe, given in zip(pipes, arguments, strict=True):
            pipe.send_bytes(pickle.dumps((method, given)))
        answers: dict[int, Any] = {}
        while pipes:
            ready = wait(list(pipes), TIMEOUT_S)
            if not ready:
                raise TimeoutError(f"ranks {sorted(pipes.values())} gave no answer to {method} in {TIMEOUT_S:.0f} s")
            for pipe in ready:
                rank = pipes.pop(pipe)
                answers[rank] = self._receive(pipe, rank, method)
        return [answers[rank] for rank in ranks]

    def _receive(self, pipe: Any, rank: int, method: str) -> Any:
        try:
            failed, value = pickle.loads(pipe.recv_bytes())
        except (EOFError, OSError):
            failed, value = True, "the process ended"
        if failed:
            raise RuntimeError(f"rank {rank}, {method}: {value}")
        return value


def _serve(pipe: Any, stage: str, rank: int, size: int, device: str, backend: str, transport: str) -> None:
    """One rank's process: its worker's methods, by name."""
    from dhp.cluster.worker import GroupSettings, Worker
    from experiments.gpu_check.workshop import end_with_parent

    cuda = device == "cuda"
    shared_memory.SMALLEST_BYTES = SMALLEST_BYTES
    settings = GroupSettings(
        stage, size, backend, 1, TIMEOUT_S, None, True, transport=transport, trace=True, pinned=cuda, cuda=cuda,
        shares_gpu=True,
    )  # fmt: skip
    end_with_parent()
    worker = Worker(settings, rank)
    with suppress(EOFError, OSError):  # whoever asks is gone
        while True:
            method, given = pickle.loads(pipe.recv_bytes())
            try:
                answer = (False, getattr(worker, method)(*given))
            except BaseException:
                answer = (True, traceback.format_exc())
            pipe.send_bytes(pickle.dumps(answer))
