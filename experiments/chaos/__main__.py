"""`python -m experiments.chaos --points`: what a run keeps of itself when its processes are killed. See README.md."""

import argparse
import json
import os
import random
import secrets
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from dhp.checkpoint.folder import checkpoints, newest_checkpoint
from dhp.supervise.supervisor import adopt_orphans
from experiments.chaos.points import LONG, Lengths, flip_bit, lengths_of, points, prepare, reference_of, settings
from experiments.chaos.run import LIMIT_S, Judged, Observed, Strike, Watch, judge, train
from experiments.commands import command_of
from experiments.two_hosts.network import run

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
    is done to a file. after_steps: as soon as metrics.jsonl has so many lines."""

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


NAMESPACE, LINK, FAR_LINK = "dhp-far", "dhp-near", "dhp-link"
NEAR, FAR, PORT = "10.78.0.1", "10.78.0.2", 6399
CUT_S = 40.0  # longer than the limits by which the run notices
RAY = Path(sys.executable).with_name("ray")


@dataclass
class Nodes:
    """The cluster. environment: of those who join it."""

    environment: Mapping[str, str]
    near: list[subprocess.Popen[bytes]] = field(default_factory=list)
    far: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def address(self) -> str:
        """Of the head."""
        return f"{NEAR}:{PORT}"

    def pids(self) -> set[int]:
        """Of what was started."""
        return {process.pid for process in [*self.near, *self.far]}

    def start_near(self) -> None:
        """The head, with room for two actors."""
        self.near.append(self._start([], ["--head", f"--port={PORT}", f"--node-ip-address={NEAR}"]))

    def wait_for_near(self, limit_s: float = 120.0) -> None:
        """Until the head listens: a node that finds none gives up. Raises TimeoutError."""
        deadline = time.time() + limit_s
        while time.time() < deadline:
            with suppress(OSError), socket.create_connection((NEAR, PORT), timeout=1.0):
                time.sleep(3)
                return
            time.sleep(0.5)
        raise TimeoutError(f"no Ray at {self.address} after {limit_s:g} s")

    def start_far(self) -> None:
        """The other node, in its namespace: for the first time, or again, as its owner would."""
        inside = ["ip", "netns", "exec", NAMESPACE]
        self.far.append(self._start(inside, [f"--address={self.address}", f"--node-ip-address={FAR}"]))

    def end(self) -> None:
        """End both."""
        for process in [*self.far, *self.near]:
            process.terminate()
        for process in [*self.far, *self.near]:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()

    def _start(self, prefix: list[str], more: list[str]) -> subprocess.Popen[bytes]:
        command = [*prefix, str(RAY), "start", "--block", "--num-cpus=2", "--disable-usage-stats", *more]
        quiet: Any = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        return subprocess.Popen(command, env={**os.environ, **self.environment}, **quiet)


@contextmanager
def two_nodes() -> Iterator[Nodes]:
    """The cluster, its link up. Raises `experiments.two_hosts.network.Unavailable` where it cannot be made."""
    run(f"ip netns add {NAMESPACE}")
    try:
        run(f"ip link add {LINK} type veth peer name {FAR_LINK} netns {NAMESPACE}")
        run(f"ip addr add {NEAR}/24 dev {LINK}")
        run(f"ip -n {NAMESPACE} addr add {FAR}/24 dev {FAR_LINK}")
        for up in (f"-n {NAMESPACE} link set lo up", f"-n {NAMESPACE} link set {FAR_LINK} up", f"link set {LINK} up"):
            run(f"ip {up}")
        nodes = Nodes({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)})
        try:
            nodes.start_near()
            nodes.wait_for_near()
            nodes.start_far()
            yield nodes
        finally:
            nodes.end()
    finally:
        run(f"ip netns del {NAMESPACE}")  # and the link with it


def cut_and_mend(nodes: Nodes, after_steps: int) -> Any:
    """As `experiments.chaos.run.Strike`: cut the link after so many steps; behind `CUT_S` it is up again, and the node
    that was given up is started once more."""

    def strike(watch: Watch) -> Mapping[str, Any] | None:
        if watch.fired is not None:
            if time.time() > float(watch.fired["at"]) + CUT_S and len(nodes.far) == 1:
                run(f"ip link set {LINK} up")
                nodes.far[0].terminate()
                nodes.far[0].wait()
                nodes.start_far()
            return None
        if watch.steps() < after_steps:
            return None
        run(f"ip link set {LINK} down")
        return {"at": time.time(), "process": "the link between two nodes", "pid": 0}

    return strike


Row = dict[str, Any]
_SECONDS = ("detect_s", "rebuild_s", "first_step_s")


def strike_points(laboratory: Laboratory, name: str) -> Iterator[Row]:
    """A row for each point whose name begins so."""
    for point in points():
        if point.name.startswith(name):
            about: Row = {"point": point.name, "process": point.kind, "scenario": point.scenario}
            yield about | _row(*laboratory.run(point.scenario, point.environment))


def strike_at_random(laboratory: Laboratory, count: int, seed: int, only: str) -> Iterator[Row]:
    """A row for each of so many faults that a seed draws. only: a kind or a process, or of all."""
    for fault in draw(seed, count, lengths_of(LONG).steps):
        if only not in ("", fault.kind, fault.target):
            continue
        found = laboratory.run(
            LONG, lambda fired, of=fault: of.environment or {}, names_rank=fault.names_rank,
            small_disk=fault.kind == FULL, strike=strike(fault), between=partial(harm, fault),
        )  # fmt: skip
        about: Row = {"fault": fault.kind, "process": fault.target, "after_steps": fault.after_steps, "seed": seed}
        yield about | _row(*found)


def cut_link(laboratory: Laboratory) -> Iterator[Row]:
    """A row for a link between two nodes that is cut for a while, as root."""
    after = lengths_of(LONG).steps // 3
    laboratory.reference(LONG)  # before there is a cluster that would be a leftover of it
    with two_nodes() as nodes:
        more = [f"cluster.address={nodes.address}", "cluster.collocate=false", "cluster.collective_timeout_s=10"]
        found = laboratory.run(
            LONG, lambda fired: nodes.environment, names_rank=False, more=more, strike=cut_and_mend(nodes, after),
            apart=nodes.pids,
        )  # fmt: skip
    yield {"fault": "partition", "process": "the link", "after_steps": after} | _row(*found)


def summary(rows: Sequence[Row], command: str) -> Row:
    """All faults of a command in one row; seconds as [median, largest], of those that were killed."""
    killed = [row for row in rows if row.get("fault", KILL) == KILL]
    found: Row = {
        "runs": len(rows), "completed": sum(row["completed"] for row in rows),
        "identical": sum(row["identical"] for row in rows), "samples_lost": sum(row["samples_lost"] for row in rows),
        "samples_repeated": sum(row["samples_repeated"] for row in rows),
        "lost_steps": max((row["lost_steps"] or 0 for row in rows), default=0),
        "problems": sum(bool(row["problems"]) for row in rows),
    }  # fmt: skip
    for key in _SECONDS:
        known = [row[key] for row in killed if row[key] is not None]
        found[key] = [round(statistics.median(known), 2), max(known)] if known else None
    load = [round(value, 1) for value in os.getloadavg()]
    return found | {"cores": os.cpu_count(), "load": load, "command": command}


def _row(observed: Observed, judged: Judged) -> Row:
    about: Row = {"commands": observed.commands, "attempts": len(observed.faults) or 1}
    return about | {"wall_s": round(observed.wall_s, 1)} | judged.row()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m experiments.chaos")
    parser.add_argument("--points", nargs="?", const="", metavar="NAME", help="every named point, or those of a name")
    parser.add_argument("--runs", type=int, metavar="N", help="so many faults from outside, drawn by --seed")
    parser.add_argument("--only", default="", metavar="KIND", help="of --runs, those of a kind or process")
    parser.add_argument("--partition", action="store_true", help="the link between two nodes is cut for a while")
    parser.add_argument("--seed", type=int, default=31)
    parser.add_argument("--folder", type=Path, help="where runs are made; a temporary folder by default")
    parser.add_argument("--keep", action="store_true", help="keep the directories of runs with problems")
    given = parser.parse_args(arguments)
    adopt_orphans()
    folder = given.folder or Path(tempfile.mkdtemp(prefix="dhp-chaos-", dir="/tmp"))
    laboratory, rows = Laboratory(folder, given.keep), []
    command = command_of("chaos", arguments)
    faults = strike_points(laboratory, given.points or "")
    if given.partition:
        faults = cut_link(laboratory)
    elif given.runs is not None:
        faults = strike_at_random(laboratory, given.runs, given.seed, given.only)
    for row in faults:
        rows.append(row | {"command": command})
        print(json.dumps(rows[-1]), flush=True)
    print(json.dumps(summary(rows, command)), flush=True)
    if not given.folder and not given.keep:
        shutil.rmtree(folder)
    return int(any(row["problems"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
