"""Faults from outside, drawn by a seed: which process of a run, what happens to it, and when."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dhp.checkpoint.folder import checkpoints, newest_checkpoint
from experiments.chaos.run import Strike, Watch
from experiments.chaos.scenarios import flip_bit

RANKS = ("vision-0", "vision-1", "text-0", "text-1")
ACTORS = (*RANKS, "data", "data-0")
# Ray's own test switches; a name that it does not know is ignored without a word.
LATE = {"RAY_testing_asio_delay_us": "CoreWorkerService.grpc_server.PushTask=20000:60000"}
LOST = {
    "RAY_testing_rpc_failure": '{"CoreWorkerService.grpc_client.PushTask":{"num_failures":1,"req_failure_prob":0,'
    '"resp_failure_prob":1}}'
}
KILL, STOP, DAMAGE, FULL, MESSAGES = "kill", "stop", "damage", "full disk", "messages"


@dataclass(frozen=True)
class Fault:
    """What happens to a run.

    kind: kill | stop | damage (killed whole, and a file of its newest checkpoint is harmed before the command is given
    again) | full disk (for a while) | messages (late or lost, from the beginning). target: name of a process, or what
    is done to a file. after_steps: as soon as metrics.jsonl has so many lines.
    """

    kind: str
    target: str
    after_steps: int
    environment: Mapping[str, str] | None = None

    @property
    def names_rank(self) -> bool:
        """Whether the run's message is to name the process's part and rank."""
        return self.kind in (KILL, STOP) and self.target in RANKS


def draw(seed: int, count: int, steps: int) -> list[Fault]:
    """So many faults: of each kind of process one is killed and one stopped, files are harmed, a disk is full, messages
    come late or not at all; beyond these, kills."""
    random_ = random.Random(seed)
    at = lambda: random_.randrange(3, steps - 8)
    found = [Fault(KILL, name, at()) for name in (random_.choice(RANKS), "data", "data-0", "driver", "raylet")]
    found += [Fault(KILL, name, at()) for name in ("gcs_server", "supervisor")]
    found += [Fault(STOP, name, at()) for name in (random_.choice(RANKS), "data", "data-0", "raylet", "gcs_server")]
    found += [Fault(DAMAGE, how, at() + 5) for how in ("bit", "cut", "missing", "manifest")]
    found += [Fault(FULL, "checkpoints", at())]
    found += [Fault(MESSAGES, "late", 0, LATE), Fault(MESSAGES, "lost", 0, LOST)]
    while len(found) < count:
        found.append(Fault(KILL, random_.choice(ACTORS), at()))
    return found[:count]


def strike(fault: Fault) -> Strike:
    """What brings the fault about, called while a run runs."""
    acts: dict[str, Callable[[Fault, Watch], Mapping[str, Any] | None]] = {
        KILL: _signal,
        STOP: _signal,
        DAMAGE: _end_all,
        FULL: _fill,
        MESSAGES: lambda fault, watch: {"at": time.time(), "process": fault.target, "pid": 0},
    }

    def act(watch: Watch) -> Mapping[str, Any] | None:
        if watch.fired is not None:
            return None  # once
        return acts[fault.kind](fault, watch) if watch.steps() >= fault.after_steps else None

    return act


def harm(fault: Fault, run_dir: Path) -> None:
    """Harm a file of the newest checkpoint, as the fault says; what another fault needs: nothing."""
    newest = newest_checkpoint(run_dir / "checkpoints")
    if fault.kind != DAMAGE or newest is None:
        return
    file = sorted((newest / "text").glob("rank_*.safetensors"))[-1]
    if fault.target == "bit":
        flip_bit(file)
    elif fault.target == "cut":
        os.truncate(file, file.stat().st_size - 7)
    elif fault.target == "missing":
        file.unlink()
    else:
        (newest / "checkpoint.json").unlink()


def _signal(fault: Fault, watch: Watch) -> Mapping[str, Any] | None:
    assert watch.process is not None
    number = signal.SIGKILL if fault.kind == KILL else signal.SIGSTOP
    if fault.target == "supervisor":
        found: Sequence[psutil.Process] = [psutil.Process(watch.process.pid)]
    else:
        found = watch.processes().get(fault.target, ())
    for process in found:
        with suppress(psutil.Error):
            process.send_signal(number)
            return {"at": time.time(), "process": fault.target, "pid": process.pid}
    return None


def _end_all(fault: Fault, watch: Watch) -> Mapping[str, Any] | None:
    """As where a machine loses its power; not before there is a checkpoint besides the one that is harmed then."""
    if len(checkpoints(watch.run_dir / "checkpoints")) < 2:
        return None
    assert watch.process is not None
    command = psutil.Process(watch.process.pid)
    for process in [command, *command.children(recursive=True)]:
        with suppress(psutil.Error):
            process.kill()
    return {"at": time.time(), "process": "all", "pid": command.pid}


def _fill(fault: Fault, watch: Watch) -> Mapping[str, Any] | None:
    """Fill the disk of the checkpoints, which has to be a small one, until there are some steps more."""
    ballast = watch.run_dir / "checkpoints" / "ballast"
    before = watch.steps()
    with suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    at = time.time()
    while watch.steps() < before + 7 and time.time() < at + 60:
        time.sleep(0.05)
    ballast.unlink()
    return {"at": at, "process": fault.target, "pid": 0}
