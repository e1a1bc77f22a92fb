"""Runs that are watched, and what is wrong with one that a fault has met."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch

from dhp.checkpoint.folder import check_checkpoint, checkpoints, newest_checkpoint, step_of
from dhp.checkpoint.shard_reader import read_shards
from dhp.core.errors import CheckpointError
from experiments.chaos.points import USERS_FILES

ROOT = Path(__file__).parents[2]
INJECT = Path(__file__).parent / "inject"
LIMIT_S = 600.0  # of one command; a run takes a tenth of it
GONE_S = 30.0  # after a run's end none of its processes may be there
_LOOK_S = 0.02
_FAILED = re.compile(r"\s*[\d.:]+ s?\s*attempt \d+ failed|attempt \d+ failed")  # as the supervisor says it


class Line(NamedTuple):
    """A line of output, and when it came."""

    at: float
    text: str


Strike = Callable[["Watch"], Mapping[str, Any] | None]  # {"at", "pid", "process"} of what it did to a run


@dataclass(frozen=True)
class Observed:
    """What a run and its fault were, from outside. Times are seconds since 1970.

    code: the last command's exit status. commands: how many it took. output: of all. fired: what was struck, and when;
    None: nothing was. first_step: when the first step after the fault was in metrics.jsonl. faults: verdicts in
    run_dir. stopped: when nothing of each failed attempt was left. left: processes and files that were still there
    `GONE_S` after the end. began, ended: the commands."""

    run_dir: Path
    code: int
    commands: int
    output: str
    fired: Mapping[str, Any] | None
    first_step: float | None
    faults: Sequence[Mapping[str, Any]]
    stopped: Sequence[float]
    left: Sequence[str]
    began: float
    ended: float

    @property
    def wall_s(self) -> float:
        """Seconds of all commands."""
        return self.ended - self.began


class Watch:
    """Looks at one run's metrics.jsonl and processes while it runs. A line after a fault is one of another attempt when
    the file was written anew since: an attempt that goes on cuts it first."""

    def __init__(self, run_dir: Path, fired_file: Path):
        self.run_dir, self._fired_file = run_dir, fired_file
        self.process: subprocess.Popen[str] | None = None
        self.first_step: float | None = None
        self._inode: int | None = None  # of the file at the time of the fault
        self._base: int | None = None  # lines of the one that followed it, when it was first seen

    @property
    def fired(self) -> dict[str, Any] | None:
        """What was struck; None: nothing yet."""
        try:
            found: dict[str, Any] = json.loads(self._fired_file.read_text())
            return found
        except (OSError, ValueError):
            return None

    def tell_fired(self, fired: Mapping[str, Any]) -> None:
        """Something was struck from outside, for the first time or once more."""
        self._fired_file.write_text(json.dumps(dict(fired)))
        self._inode, self._base, self.first_step = self._metrics()[0], None, None

    def look(self) -> None:
        """Look once."""
        if self.first_step is not None:
            return
        inode, lines = self._metrics()
        if self.fired is None:
            self._inode = inode
        elif inode is not None and inode != self._inode:
            if self._base is None:
                self._base = 0 if self._inode is None else lines  # what the attempt that goes on has left of it
            if lines > self._base:
                self.first_step = time.time()

    def steps(self) -> int:
        """Lines of metrics.jsonl now."""
        return self._metrics()[1]

    def newest_checkpoint(self) -> int:
        """The step of the newest complete checkpoint in the run's own directory; 0: there is none."""
        newest = newest_checkpoint(self.run_dir / "checkpoints")
        return 0 if newest is None else step_of(newest)

    def processes(self) -> dict[str, list[psutil.Process]]:
        """Processes of the run, by what they are: `text-1`, `data`, `driver`, `raylet`, `gcs_server` …"""
        found: dict[str, list[psutil.Process]] = {}
        assert self.process is not None
        with suppress(psutil.Error):
            for one in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.Error, OSError):
                    found.setdefault(_name(one), []).append(one)
        return found

    def _metrics(self) -> tuple[int | None, int]:
        try:
            with (self.run_dir / "metrics.jsonl").open("rb") as file:
                return os.fstat(file.fileno()).st_ino, file.read().count(b"\n")
        except OSError:
            return None, 0


def _name(process: psutil.Process) -> str:
    with suppress(OSError):
        log = os.path.basename(os.readlink(f"/proc/{process.pid}/fd/1"))
        if log.endswith(".log") and log.startswith(("vision", "text", "data")):
            return log[:-4]
    line = process.cmdline()
    if "dhp.train_ray" in line:
        return "driver"
    return os.path.basename(line[0].split(" ")[0]) if line else process.name()


def train(
    arguments: Sequence[str],
    run_dir: Path,
    scratch: Path,
    environment: Mapping[str, str] | None = None,
    strike: Strike | None = None,
    between: Callable[[Path], None] = lambda run_dir: None,
    limit_s: float = LIMIT_S,
    apart: Callable[[], Collection[int]] = set,
) -> Observed:
    """Run until it has completed; where the command itself was killed, again with training.resume=auto. scratch: an
    empty folder, for what is temporary. environment: besides this process's. strike: acts on the run while it runs;
    called again and again until it answers. between: acts on run_dir before the second command. apart: processes
    below this one that are no part of the run. The caller has adopted orphans (`dhp.supervise.supervisor`)."""
    watch = Watch(run_dir, scratch / "fired")
    temporary = scratch / "t"
    temporary.mkdir()
    shared = _shared_memory()
    own = {"PYTHONPATH": f"{INJECT}:{ROOT}", "TMPDIR": str(temporary), **(environment or {})}
    given, lines, began, commands = list(arguments), list[Line](), time.time(), 0
    while True:
        commands += 1
        code = _command(given, own, watch, strike, limit_s, lines)
        if code >= 0 or commands > 1:
            break
        _wait_for_none(apart())
        between(run_dir)
        given = [*(one for one in given if not one.startswith("training.resume=")), "training.resume=auto"]
    ended = time.time()
    left = [*_wait_for_none(apart()), *_temporary(temporary), *_unowned(_shared_memory() - shared)]
    faults = [json.loads(file.read_text()) for file in sorted((run_dir / "faults").glob("*.json"))]
    stopped = [line.at for line in lines if _FAILED.match(line.text)]
    said = "".join(line.text for line in lines)
    return Observed(run_dir, code, commands, said, watch.fired, watch.first_step, faults, stopped, left, began, ended)


def _command(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    watch: Watch,
    strike: Strike | None,
    limit_s: float,
    lines: list[Line],
) -> int:
    """Exit status of one command; what it prints is added to `lines`."""
    command = [sys.executable, "-m", "dhp.train_ray", *arguments]
    process = subprocess.Popen(
        command, cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace",
    )  # fmt: skip
    watch.process = process
    reading = threading.Thread(
        target=lambda: lines.extend(Line(time.time(), text) for text in process.stdout or ()), daemon=True
    )
    reading.start()
    deadline = time.time() + limit_s
    while process.poll() is None:
        watch.look()
        if strike is not None and (fired := strike(watch)) is not None:
            watch.tell_fired(fired)
        if time.time() > deadline:
            _end(process)
            lines.append(Line(time.time(), f"the command did not end in {limit_s:g} s\n"))
            break
        time.sleep(_LOOK_S)
    watch.look()
    reading.join(GONE_S)
    return process.wait()


def _end(process: subprocess.Popen[str]) -> None:
    with suppress(psutil.Error):
        for one in psutil.Process(process.pid).children(recursive=True):
            one.kill()
    process.kill()


def _wait_for_none(apart: Collection[int]) -> list[str]:
    """What still runs below this process after `GONE_S`, but these and what they have started; it is ended."""
    deadline = time.time() + GONE_S
    while (left := [one for one in _living() if not _is_below(one, apart)]) and time.time() < deadline:
        time.sleep(0.1)
    names = [f"process {_label(one)}" for one in left]
    for one in left:
        with suppress(psutil.Error):
            one.kill()
    return names


def _is_below(process: psutil.Process, apart: Collection[int]) -> bool:
    with suppress(psutil.Error):
        return not {process.pid, *(parent.pid for parent in process.parents())}.isdisjoint(apart)
    return False


def _living() -> Iterator[psutil.Process]:
    for one in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if one.status() != psutil.STATUS_ZOMBIE:
                yield one
            elif one.ppid() == os.getpid():
                with suppress(OSError):
                    os.waitpid(one.pid, os.WNOHANG)


def _label(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:80] or process.name()
    except psutil.Error:
        return str(process.pid)


def _temporary(folder: Path) -> list[str]:
    """Files that a run left in its temporary folder; Ray's logs are to stay after a fault."""
    found = (path for path in folder.rglob("*") if path.is_file() or path.is_socket() or path.is_symlink())
    return [f"file {path.name}" for path in found if not _is_log(path.relative_to(folder))]


def _is_log(path: Path) -> bool:
    return path.parts[0].startswith("dhp-ray-")


def _shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


def _unowned(names: set[str]) -> list[str]:
    """Names of shared memory that no process maps: others on this machine make some too."""
    maps = ""
    for file in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):
            maps += file.read_text()
    return [f"shared memory {name}" for name in sorted(names) if f"/dev/shm/{name}" not in maps]


SAME = ("loss", "grad_norm", "sample_digest")  # of a line of metrics.jsonl, to the bit
_OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class Judged:
    """What is known of a fault.

    completed: the run ended with all its steps. identical: losses, norms, samples and the newest checkpoint are those
    of the undisturbed run. samples_lost, samples_repeated: trained on less, or more, often than there. lost_steps:
    steps that were made again. detect_s: from the fault until its verdict was known; rebuild_s: until a step
    after it could begin; first_step_s: from the fault until that step had ended. problems: what was not as it should
    be."""

    completed: bool
    identical: bool
    samples_lost: int
    samples_repeated: int
    lost_steps: int | None
    detect_s: float | None
    rebuild_s: float | None
    first_step_s: float | None
    message: str
    problems: tuple[str, ...]

    def row(self) -> dict[str, Any]:
        """As it is printed."""
        rounded = {key: round(value, 2) if isinstance(value, float) else value for key, value in asdict(self).items()}
        return rounded | {"problems": list(self.problems)}


def judge(observed: Observed, reference: Path, batch: int, names_rank: bool) -> Judged:
    """Compare. reference: run_dir of the undisturbed run. names_rank: the message is to name a part and its rank."""
    ours, theirs = read_lines(observed.run_dir), read_lines(reference)
    different = list(_differences(ours, theirs))
    weights = list(_newest_differs(observed.run_dir, reference))
    problems = [*different, *weights, *_damaged(observed.run_dir), *observed.left]
    problems += _leftovers(observed.run_dir, ends_killed=not observed.faults)
    problems += [f"{name} of the user's is gone" for name in USERS_FILES if not (observed.run_dir / name).is_file()]
    completed = observed.code == 0 and {step for kind, step in theirs if kind == "train"} <= {
        step for kind, step in ours if kind == "train"
    }
    if not completed:
        problems.append(f"exit status {observed.code}: {observed.output[-600:]}")
    if observed.fired is None:
        problems.append("the point was not reached")
    lost, repeated = _samples(observed.run_dir, reference, batch)
    verdict: Mapping[str, Any] = observed.faults[0] if observed.faults else {}
    if names_rank and observed.fired is not None:
        problems += _unnamed(verdict, str(observed.fired["process"]))
    at = None if observed.fired is None else float(observed.fired["at"])
    since = lambda time: None if at is None or time is None else time - at
    detected = since(verdict.get("at"))
    first = since(observed.first_step)
    between = None if detected is None or first is None else first - detected
    said = str(verdict.get("message", "")).partition("\n")[0]
    step = None if verdict.get("step") is None else int(verdict["step"])
    lost_steps = None if step is None else max(0, step - _resumed_at(observed, verdict))
    same = not different and not weights
    return Judged(completed, same, lost, repeated, lost_steps, detected, between, first, said, tuple(problems))


def read_lines(run_dir: Path) -> dict[tuple[str, int], dict[str, Any]]:
    """Lines of metrics.jsonl, by kind and step."""
    file = run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return {(line["kind"], line["step"]): line for line in lines}


def _differences(ours: Mapping[Any, Any], theirs: Mapping[Any, Any]) -> Iterator[str]:
    for key, line in theirs.items():
        if key not in ours:
            yield f"{key[0]} {key[1]} is missing"
            continue
        for field in SAME:
            if ours[key].get(field) != line.get(field):
                yield f"{key[0]} {key[1]}: {field} {ours[key].get(field)} is not {line.get(field)}"


def _newest_differs(run_dir: Path, reference: Path) -> Iterator[str]:
    """In what the newest checkpoint is not the undisturbed run's of that step: weights, masters, moments, counts."""
    newest = next(iter(checkpoints(run_dir / "checkpoints")), None)
    if newest is None:
        yield "there is no checkpoint"
        return
    other = reference / "checkpoints" / newest.name
    if not other.is_dir():
        yield f"{newest.name} has no checkpoint to compare with"
        return
    for part in json.loads((other / "checkpoint.json").read_text())["parts"]:
        for below in ("", _OPTIMIZER):
            ours, theirs = read_shards(newest / part / below), read_shards(other / part / below)
            if ours.keys() != theirs.keys():
                yield f"{newest.name}/{part}/{below}: other tensors"
                continue
            for name in theirs:
                if not torch.equal(ours[name], theirs[name]):
                    yield f"{newest.name}/{part}/{below}: {name} differs"


def _damaged(run_dir: Path) -> Iterator[str]:
    for checkpoint in checkpoints(run_dir / "checkpoints"):
        try:
            check_checkpoint(checkpoint)
        except CheckpointError as error:
            yield f"{checkpoint.name} of step {step_of(checkpoint)}: {error}"


def _leftovers(run_dir: Path, ends_killed: bool) -> Iterator[str]:
    """ends_killed: the last attempt itself was killed, behind its end: its lock's file stays, and is no obstacle."""
    for pattern in ("*.partial", "*.removed", "*.tmp", *(() if ends_killed else (".attempt.json", ".running*"))):
        for path in (run_dir / "checkpoints").glob(pattern):
            yield f"checkpoints/{path.name} is left"


def _samples(run_dir: Path, reference: Path, batch: int) -> tuple[int, int]:
    digests = [_digests(folder) for folder in (run_dir, reference)]
    ours, theirs = digests
    lost = sum(max(0, theirs.count(one) - ours.count(one)) for one in set(theirs))
    repeated = sum(max(0, ours.count(one) - theirs.count(one)) for one in set(ours))
    return lost * batch, repeated * batch


def _digests(run_dir: Path) -> list[str]:
    file = run_dir / "metrics.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    return [str(line["sample_digest"]) for line in lines if line["kind"] == "train"]


def _unnamed(verdict: Mapping[str, Any], process: str) -> Sequence[str]:
    """What a verdict does not say about the death of an actor."""
    part, _, rank = process.partition("-")
    wanted = {"part": part, "rank": int(rank)} if part.partition(".")[0] in ("vision", "text") and rank else {}
    wrong = [f"verdict: {key}={verdict.get(key)!r}, not {value!r}" for key, value in wanted.items()]
    wrong = [text for text, (key, value) in zip(wrong, wanted.items()) if verdict.get(key) != value]
    if not verdict:
        return ["there is no verdict"] if wanted else []
    if verdict.get("state") in ("training", "saving") and verdict.get("step") is None and wanted:
        wrong.append("verdict: no step")
    if wanted and not verdict.get("action"):
        wrong.append("verdict: no action")
    return wrong


def _resumed_at(observed: Observed, verdict: Mapping[str, Any]) -> int:
    followed = str(verdict.get("followed_by", ""))
    name = followed.rpartition("step_")[2]
    return int(name) if "step_" in followed and name.isdigit() else 0
