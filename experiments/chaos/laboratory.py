"""Faults from outside, drawn by a seed, and runs of a scenario that meet one, each beside the undisturbed one."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from dhp.checkpoint.folder import checkpoints, newest_checkpoint
from experiments.chaos.judge import Judged, judge
from experiments.chaos.points import Lengths, flip_bit, lengths_of, prepare, reference_of, settings
from experiments.chaos.run import LIMIT_S, Observed, Strike, Watch, train

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
        KILL: _signal, STOP: _signal, DAMAGE: _end_all, FULL: _fill,
        MESSAGES: lambda fault, watch: {"at": time.time(), "process": fault.target, "pid": 0},
    }  # fmt: skip

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


BATCH = 8  # samples of a step
SUPERVISED = ("training.max_restarts=8", "training.restart_wait_s=0")


class Laboratory:
    """A folder with assets and the undisturbed runs, each made when it is first asked for."""

    def __init__(self, folder: Path, keep: bool = False):
        """keep: directories of runs with problems stay."""
        self.folder, self._keep, self._number = folder, keep, 0
        self._references: dict[tuple[str, Lengths], Observed] = {}

    def reference(self, scenario: str, lengths: Lengths | None = None) -> Observed:
        """The undisturbed run of a scenario. Raises RuntimeError where it fails."""
        key = reference_of(scenario), lengths or lengths_of(scenario)
        if key not in self._references:
            run_dir = self.folder / f"reference-{len(self._references)}"
            arguments = settings(key[0], self.folder / "assets", run_dir, lengths=key[1])
            with self._scratch() as scratch:
                observed = train(arguments, run_dir, scratch, limit_s=LIMIT_S + key[1].steps)
            if observed.code:
                raise RuntimeError(f"the undisturbed run failed: {observed.output[-3000:]}")
            self._references[key] = observed
        return self._references[key]

    def run(
        self,
        scenario: str,
        environment: Callable[[Path], Mapping[str, str]] = lambda fired: {},
        names_rank: bool = True,
        small_disk: bool = False,
        lengths: Lengths | None = None,
        more: Sequence[str] = (),
        **watched: Any,
    ) -> tuple[Observed, Judged]:
        """A supervised run of a scenario that meets a fault, and what is to be said of it. environment: of the file in
        which the fault says that it has come. more: arguments of the run. small_disk: checkpoints have one of their own
        (as root)."""
        reference = self.reference(scenario, lengths).run_dir
        self._number += 1
        run_dir = self.folder / f"run-{self._number}"
        with own_disk(run_dir / "checkpoints") if small_disk else nullcontext():
            begins = prepare(scenario, reference, run_dir)
            arguments = settings(scenario, self.folder / "assets", run_dir, [*SUPERVISED, *begins, *more], lengths)
            with self._scratch() as scratch:
                observed = train(arguments, run_dir, scratch, environment(scratch / "fired"), **watched)
            judged = judge(observed, reference, BATCH, names_rank)
        if not (self._keep and judged.problems):
            shutil.rmtree(run_dir)
        return observed, judged

    @contextmanager
    def _scratch(self) -> Iterator[Path]:
        with tempfile.TemporaryDirectory(prefix="dhp-c-", dir="/tmp") as folder:
            yield Path(folder)


@contextmanager
def own_disk(folder: Path, size: str = "256m") -> Iterator[None]:
    """A small file system at `folder`. Raises CalledProcessError where this process may not mount one."""
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "dhp-chaos", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)
