"""What happened beside steps: a line each in events.jsonl, of every attempt of a run."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

FILE = "events.jsonl"
START, SAVE, EVALUATION, SKIPPED, NONFINITE, END = "start", "save", "evaluation", "skipped", "nonfinite", "end"


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """One event. Each field's string says its unit and when it is null."""

    event: str
    """`start`, an attempt of the run began to train; `save`, a checkpoint is complete; `evaluation`; `skipped`, a bad
    sample was left out; `nonfinite`, a step updated nothing; `end`, the attempt ended by itself. Unit: a word."""
    step: int
    """Optimizer steps that were done. Unit: steps."""
    time: float
    """When it was written. Unit: seconds since 1970."""
    seconds: float | None = None
    """For how long training waited for it. Unit: seconds. Null: it did not."""
    text: str = ""
    """What is to be said of it. Unit: text."""


class EventWriter:
    """Appends to `<run_dir>/events.jsonl`; what earlier attempts wrote stays. A line is on disk when `write`
    returns."""

    def __init__(self, run_dir: Path):
        path = run_dir / FILE
        torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
        self._file = open(path, "a", encoding="utf-8")
        if torn:  # the attempt before was killed while it wrote
            self._file.write("\n")

    def write(self, event: str, step: int, seconds: float | None = None, text: str = "") -> None:
        """Record an event that happens now."""
        line = Event(event=event, step=step, time=time.time(), seconds=seconds, text=text)
        self._file.write(json.dumps(asdict(line)) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file. May be called again."""
        self._file.close()


def read_events(run_dir: Path) -> list[Event]:
    """All events, oldest first, without lines that are not whole; none where there is no such file."""
    path, found = run_dir / FILE, []
    if not path.exists():
        return []
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            event = Event(**json.loads(text))
        except (ValueError, TypeError):  # the run was killed while it wrote this
            continue
        numbers = isinstance(event.step, int) and isinstance(event.time, int | float)
        if numbers and isinstance(event.seconds, int | float | None) and isinstance(event.event, str):
            found.append(event)
    return found
