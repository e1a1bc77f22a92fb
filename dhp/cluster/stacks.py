"""Where the actors of a run stand: on SIGUSR1 each writes the stacks of its threads to a file, also while it waits in a
collective and answers no call. Where several stand alike and one does not, that one is who they wait for."""

from __future__ import annotations

import faulthandler
import re
import signal
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from dhp.cluster.post import Post, open_kept
from dhp.cluster.processes import is_stopped

SUFFIX = ".stacks"
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
    `dhp.cluster.post.open_kept`."""
    file, path = open_kept(log_dir, f"{name}{SUFFIX}", append=True)
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
