"""Where the actors of a run stand: on SIGUSR1 each writes the stacks of its threads beside its log, also while it waits
in a collective and answers no call. Where several stand alike and one does not, that one is who they wait for."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from dhp.cluster.processes import descendants

SUFFIX = ".stacks"
WAIT_S = 2.0  # for an actor to write them; one that is frozen never does
_POLL_S = 0.05
_COMPARED = 12  # frames, from the innermost one: where a loop is in its rows does not matter further out
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+ .*:$")
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$')
_FOLDERS = re.compile(r"^.*/(?:site-packages|python\d+\.\d+)/")
_OURS = "dhp/"


@dataclass(frozen=True)
class Frame:
    """A call. file: from the folder of its package on."""

    file: str
    line: int
    name: str

    def __str__(self) -> str:
        return f"{self.name} ({self.file}:{self.line})"


def keep_stacks(log_dir: str | None, name: str) -> None:
    """From here on SIGUSR1 adds the stacks of this process's threads to a file beside its log. log_dir: None: it has no
    log of its own, and keeps none."""
    if log_dir is None:
        return
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW  # not to what a link leads to
    with suppress(OSError):  # the log says what is wrong with the folder
        faulthandler.register(
            signal.SIGUSR1, os.open(Path(log_dir) / f"{name}{SUFFIX}", flags, 0o644), all_threads=True
        )


def take_stacks(names: Collection[str], wait_s: float = WAIT_S) -> dict[str, tuple[Frame, ...]]:
    """Ask the actors of these names (`text-1`, as of their logs) on this machine where they are: frames of the thread
    that works, innermost first. One that does not answer is left out."""
    files = {name: (process, file) for process, file in _actors() if (name := file.stem) in names}
    begins = {name: file.stat().st_size for name, (_, file) in files.items()}
    for process, _ in files.values():
        with suppress(psutil.Error):
            process.send_signal(signal.SIGUSR1)
    found: dict[str, tuple[Frame, ...]] = {}
    deadline, before = time.monotonic() + wait_s, dict(begins)
    while len(found) < len(files) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
        for name in files.keys() - found.keys():
            size = files[name][1].stat().st_size
            if size > begins[name] and size == before[name]:  # nothing was added since the last look
                found[name] = working(files[name][1].read_bytes()[begins[name] :].decode(errors="replace"))
            before[name] = size
    return {name: frames for name, frames in found.items() if frames}


def working(text: str) -> tuple[Frame, ...]:
    """Of a dump of all threads, the one that took the signal, which is the main one: an actor works in it."""
    threads: dict[str, list[Frame]] = {}
    for line in text.splitlines():
        if _THREAD.match(line):
            frames = threads.setdefault(line, [])
        elif threads and (frame := _FRAME.match(line)):
            frames.append(Frame(_short(frame["file"]), int(frame["line"]), frame["name"]))
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
    ours = next((frame for frame in frames if frame.file.startswith(_OURS)), None)
    inner = f"in {frames[0]}"
    return inner if ours is None or ours == frames[0] else f"{inner}, from {ours}"


def _short(file: str) -> str:
    inside = file.rpartition(f"/{_OURS}")
    return f"{_OURS}{inside[2]}" if inside[1] and "site-packages" not in file else _FOLDERS.sub("", file)


def _actors() -> list[tuple[psutil.Process, Path]]:
    """Processes below this one that keep stacks, and the files of these."""
    found = []
    for process in descendants():
        with suppress(psutil.Error, OSError):
            log = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
            file = log.with_name(f"{log.stem}{SUFFIX}")
            if log.suffix == ".log" and file.is_file() and process.status() != psutil.STATUS_STOPPED:
                found.append((process, file))
    return found
