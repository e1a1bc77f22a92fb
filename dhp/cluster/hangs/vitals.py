"""Publishes vital signs of an actor: process, heartbeat, stacks."""

import faulthandler
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from dhp.cluster.servers import is_stopped
from dhp.core.collectives import RECORD, CallRecord

_SAME_S = 1.0  # of a process's start as the kernel's clock has it, read twice


@dataclass(frozen=True)
class Post:
    """A process of an actor. name: of its log (`text-1`). node: Ray's id of its node, on which `pid` and the paths
    mean something. begun: when it started, for ids of processes that ended are given to others.

    stacks: the file to which SIGUSR1 adds the stacks of its threads. heartbeat: of a rank, see
    `dhp.cluster.hangs.vitals`; "": it keeps none."""

    name: str
    node: str
    pid: int
    begun: float
    stacks: str
    heartbeat: str = ""

    def process(self) -> psutil.Process | None:
        """On its node: the process, as long as it is there."""
        try:
            found = psutil.Process(self.pid)
            return found if abs(found.create_time() - self.begun) < _SAME_S else None
        except psutil.Error:
            return None


def make_post(name: str, node: str, stacks: str, heartbeat: str = "") -> Post:
    """Of this process."""
    return Post(name, node, os.getpid(), psutil.Process().create_time(), stacks, heartbeat)


def open_lasting_file(log_dir: str | None, name: str, append: bool = False) -> tuple[int, str]:
    """A file for what a process keeps as long as it lives, and its path for others on the node: beside the logs, or,
    where none can be made there, as on a host that does not see the run's directory, in memory that ends with the
    process."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | (os.O_APPEND if append else os.O_TRUNC)  # not behind a link
    path = None if log_dir is None else Path(log_dir) / name
    if path is not None:
        try:
            return os.open(path, flags, 0o644), str(path)
        except OSError:  # the log says what is wrong with the folder
            pass
    file = os.memfd_create(name)
    return file, f"/proc/{os.getpid()}/fd/{file}"


HEARTBEAT_SUFFIX = ".heartbeat"
PERIOD_S = 0.5
AGAIN_S = 0.01  # until a beat that was being written is read again
SAVING = frozenset({"save", "saved"})  # methods in which a rank may write for as long as training.save_timeout_s
IN_STEP = frozenset({"forward_step", "backward_step", "tied_gradient", "grad_norm_sq", "optimizer_step"})


@dataclass(frozen=True)
class Beat:
    """What a rank does. In its file, times are readings of the host's clock `time.monotonic`; `read_beat` has them in
    seconds until now.

    step: from 1; of methods that are no part of a step, as saving, the last step done. verb: the engine's method; "":
    the rank waits for its next call. micro_batch: where the method has one. verb_s: since when.

    held_s: how long one collective has held it; None: none does. device: the rank's kernels run on a GPU, so that
    collectives do not hold its process; then those count as held that have begun one, and no other since, in this verb.

    saved_s: since when it has been done with the last method of `SAVING`; None: it has run none.

    counts: collectives begun, by group. group, number, members, call: of the last one its group, its number there, the
    ranks of the group, and what it is, in words."""

    step: int
    verb: str = ""
    micro_batch: int | None = None
    verb_s: float = 0.0
    held_s: float | None = None
    device: bool = False
    saved_s: float | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    group: str = ""
    number: int = 0
    members: tuple[int, ...] = ()
    call: str = ""

    def __str__(self) -> str:
        calls = ", ".join(f"{count} in group {name}" for name, count in sorted(self.counts.items()))
        last = f"; collectives so far: {calls}; the last call: {self.call}" if self.call else "; no collective so far"
        held = "" if self.held_s is None else f", in one collective for {self.held_s:.0f} s"
        return f"{self.action} for {self.verb_s:.0f} s{held}{last}"

    @property
    def action(self) -> str:
        """`step 3, forward_step of micro-batch 1`."""
        if not self.verb:
            before = f"after step {self.step - 1}, " if self.step > 1 else ""
            return f"{before}waits for its next call"
        of = "" if self.micro_batch is None else f" of micro-batch {self.micro_batch}"
        return f"step {self.step}, {self.verb}{of}" if self.verb in IN_STEP else f"{self.verb}{of}"


class Heart:
    """What a rank does, as `Beat` has it. One thread writes, another one may read."""

    def __init__(self, done: int, device: bool, record: CallRecord = RECORD):
        """done: steps before the run."""
        self._done, self._device, self._record = done, device, record
        self._doing: tuple[str, int | None, float] = ("", None, time.monotonic())
        self._saved: float | None = None

    def begin(self, verb: str, micro_batch: int | None = None) -> None:
        """The rank begins a method."""
        self._doing = (verb, micro_batch, time.monotonic())

    def end(self, steps: int = 0) -> None:
        """It has answered. steps: that it completed with this method."""
        self._done += steps
        if self._doing[0] in SAVING:
            self._saved = time.monotonic()
        self._doing = ("", None, time.monotonic())

    def beat(self) -> Beat:
        """Now; times by the clock."""
        verb, micro_batch, since = self._doing
        last, held, begun = self._record.last, self._record.held_since, self._record.last_begun
        if self._device:
            held = begun if verb and begun > since else None
        found = Beat(self._done + 1, verb, micro_batch, since, held, self._device, self._saved, self._record.numbers)
        if last is None:
            return found
        return replace(found, group=last.group, number=last.number, members=last.members, call=str(last))


def keep_heartbeat(file: int, beat: Callable[[], Beat], period_s: float = PERIOD_S) -> None:
    """Write what `beat` says to the open file whenever it has changed, looking every `period_s` seconds for as long as
    the process lives."""
    threading.Thread(target=_write_changes, args=(file, beat, period_s), name="heartbeat", daemon=True).start()


def read_beat(path: str) -> Beat | None:
    """The last one that a rank wrote, by its node's clock; None: there is none. One that is being written is read once
    more: without a beat the rank would count as one that is behind its peers."""
    values = _values(path)
    if values is None:
        time.sleep(AGAIN_S)
        values = _values(path)
    if values is None:
        return None
    now = time.monotonic()
    values |= {key: None if values[key] is None else now - values[key] for key in ("verb_s", "held_s", "saved_s")}
    return Beat(**{**values, "members": tuple(values["members"])})


def _values(path: str) -> dict[str, Any] | None:
    try:
        return dict(json.loads(Path(path).read_text()))
    except (OSError, ValueError):
        return None


def _write_changes(file: int, beat: Callable[[], Beat], period_s: float) -> None:
    written, stop = b"", threading.Event()
    while not stop.wait(period_s):
        line = f"{json.dumps(asdict(beat()))}\n".encode()
        if line != written:
            # A disk that is full or away for a while (ENOSPC, ESTALE, EIO) must not end the thread: others would take
            # the last beat for what the rank does from then on. It is written again after the next period.
            with suppress(OSError):
                os.pwrite(file, line, 0)
                os.ftruncate(file, len(line))
                written = line


STACKS_SUFFIX = ".stacks"
WAIT_S = 2.0  # for an actor to write them; one that is frozen never does
_POLL_S = 0.05
_COMPARED = 12  # frames, from the innermost one: where a loop is in its rows does not matter further out
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+ .*:$")
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$')
_FOLDERS = re.compile(r"^.*/(?:site-packages|python\d+\.\d+)/")
_OURS = "dhp/"
_STARTS = "dhp/cluster/forks/"  # below all that a process does
_IN_FRONT = ("dhp/parallel/traffic.py",)  # of every collective: says nothing


@dataclass(frozen=True)
class Frame:
    """A call. file: from the folder of its package on."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} ({self.file}:{self.line})"


def open_stacks(log_dir: str | None, name: str) -> str:
    """From here on SIGUSR1 adds the stacks of this process's threads to a file, whose path is returned: see
    `dhp.cluster.hangs.vitals.open_lasting_file`."""
    file, path = open_lasting_file(log_dir, f"{name}{STACKS_SUFFIX}", append=True)
    faulthandler.register(signal.SIGUSR1, file, all_threads=True)
    return path


def take_stacks(posts: Collection[Post], wait_s: float = WAIT_S) -> dict[Post, str]:
    """Ask these processes, which are on this machine, where they are: what each added to its file. One that does
    not answer is left out."""
    begins = {post: size for post in posts if (size := _size(post)) is not None and _asks(post)}
    found: dict[Post, str] = {}
    deadline, before = time.monotonic() + wait_s, dict(begins)
    while len(found) < len(begins) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        for post in [post for post in begins if post not in found]:
            size = _size(post) or 0
            if size > begins[post] and size == before[post]:  # nothing was added since the last look
                found[post] = _read(post, begins[post])
            before[post] = size
    return found


def _size(post: Post) -> int | None:
    try:
        return Path(post.stacks).stat().st_size
    except OSError:
        return None


def _asks(post: Post) -> bool:
    """Send the signal, unless the process is gone or stopped: it would answer when it goes on, to nobody."""
    process = post.process()
    if process is None or is_stopped(process):
        return False
    with suppress(psutil.Error):
        process.send_signal(signal.SIGUSR1)
        return True
    return False


def _read(post: Post, begin: int) -> str:
    with suppress(OSError), open(post.stacks, "rb") as file:
        file.seek(begin)
        return file.read().decode(errors="replace")
    return ""


def working(text: str) -> tuple[Frame, ...]:
    """Of a dump of all threads, the one that took the signal, which is the main one: an actor works in it."""
    threads: dict[str, list[Frame]] = {}
    for line in text.splitlines():
        if _THREAD.match(line):
            frames = threads.setdefault(line, [])
        elif threads and (frame := _FRAME.match(line)):
            found = Frame(_short(frame["file"]), int(frame["line"]), frame["name"])
            if found.file not in _IN_FRONT:
                frames.append(found)
    chosen = next((of for line, of in threads.items() if line.startswith("Current")), None)
    return tuple(chosen if chosen is not None else next(reversed(threads.values()), ()))


def group(stacks: Mapping[str, tuple[Frame, ...]]) -> list[tuple[list[str], tuple[Frame, ...]]]:
    """Names of those who stand alike, and where; the largest group first."""
    found: dict[tuple[Frame, ...], list[str]] = {}
    for name in sorted(stacks):
        found.setdefault(stacks[name][:_COMPARED], []).append(name)
    return sorted(((names, stacks[names[0]]) for names in found.values()), key=lambda one: -len(one[0]))


def odd_ones(stacks: Mapping[str, tuple[Frame, ...]]) -> list[str]:
    """Names that stand elsewhere than most of their own part, where most of it stands alike."""
    parts: dict[str, dict[str, tuple[Frame, ...]]] = {}
    for name, frames in stacks.items():
        parts.setdefault(name.rpartition("-")[0], {})[name] = frames
    found: list[str] = []
    for own in parts.values():
        (most, _), *others = group(own)
        if len(most) > len(own) / 2 and len(most) > 1:
            found += [name for names, _ in others for name in names]
    return sorted(found)


def describe(stacks: Mapping[str, tuple[Frame, ...]]) -> str:
    """A line for each group."""
    return "".join(f"\n  {', '.join(names)}: {_place(frames)}" for names, frames in group(stacks))


def _place(frames: tuple[Frame, ...]) -> str:
    ours = next((f for f in frames if f.file.startswith(_OURS) and not f.file.startswith(_STARTS)), None)
    inner = f"in {frames[0]}"
    return inner if ours is None or ours == frames[0] else f"{inner}, from {ours}"


def _short(file: str) -> str:
    inside = file.rpartition(f"/{_OURS}")
    return f"{_OURS}{inside[2]}" if inside[1] and "site-packages" not in file else _FOLDERS.sub("", file)
