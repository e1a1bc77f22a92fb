"""Records each rank's steps, stragglers, and events."""

import json
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import ceil
from pathlib import Path
from statistics import mean, median
from types import MappingProxyType
from typing import Any

from dhp.core.files import replaced
from dhp.core.reports import StageReport
from dhp.core.text import from_json, json_safe

RANKS_FILE = "ranks.jsonl"
MOST_RANKS = 64  # of which every step is kept: of more ranks, every second step or less
COMM = "comm"  # beside the kinds of methods, which are without it


@dataclass(frozen=True, kw_only=True, slots=True)
class RankLine:
    """One optimizer step, rank by rank. Each field's string says its unit and when it is null."""

    step: int
    """Optimizer step, from 1. Of a run with more than 64 ranks, every second one or less. Unit: steps."""
    seconds: Mapping[str, Mapping[str, Sequence[float]]] = field(default_factory=dict)
    """By stage and by what was done (`forward`, `backward`, `optimizer`, each without collectives; `comm`, collectives
    and waiting in them), of each rank. On GPUs `comm` is left out, and the others have it. Unit: seconds."""
    work: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """By stage, what each rank had to compute, relative to the stage's mean rank. Unit: a factor. Null: stages of which
    it is not known are left out."""
    memory_bytes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """By stage, the most device memory that each rank's allocator had reserved in the step. Unit: bytes. Null: left out
    on CPUs."""
    activation_bytes: Mapping[str, Sequence[int | None]] = field(default_factory=dict)
    """By stage, the peak of what each rank's forward kept for backward in the step. Unit: bytes. Null: of a rank that
    measured none; stages of which no rank did are left out."""
    samples: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """By dataset, the rows of the step's samples in its annotations, from 0. Unit: rows."""
    losses: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    """By dataset, for each row of `samples` the mean loss of the sample's target tokens, before the step. Unit: nats a
    token. Null: of a sample without target tokens, or left out; no datasets where losses are not measured by sample."""


def rank_line(
    step: int,
    reports: Mapping[str, Sequence[StageReport]],
    work: Mapping[str, Sequence[float]],
    samples: Mapping[str, Sequence[int]],
    losses: Mapping[str, Sequence[float | None]] = MappingProxyType({}),
) -> RankLine:
    """The line about a step. work: by stage, of each rank, in any unit; stages of which it is not known are left
    out."""
    memory = {name: [one.memory_bytes for one in of] for name, of in reports.items()}
    kept = {name: [None if one.usage is None else one.usage.peak_bytes for one in of] for name, of in reports.items()}
    return RankLine(
        step=step,
        seconds={name: _seconds(of) for name, of in reports.items()},
        work={name: [_rounded(one * len(of) / sum(of)) for one in of] for name, of in work.items() if sum(of)},
        memory_bytes={
            name: [one for one in of if one is not None] for name, of in memory.items() if of and None not in of
        },
        activation_bytes={name: of for name, of in kept.items() if any(one is not None for one in of)},
        samples=samples,
        losses={name: [None if one is None else _rounded(one) for one in of] for name, of in losses.items()},
    )


def _seconds(reports: Sequence[StageReport]) -> dict[str, list[float]]:
    kinds = dict.fromkeys(kind for one in reports for kind in one.spent)
    found = {kind: [_rounded(one.spent[kind].own_s) if kind in one.spent else 0.0 for one in reports] for kind in kinds}
    comm = [[spent.comm_s for spent in one.spent.values()] for one in reports]
    if any(None in of for of in comm):
        return found
    return found | {COMM: [_rounded(sum(one for one in of if one is not None)) for of in comm]}


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


class RankWriter:
    """Appends to `<run_dir>/ranks.jsonl`, one line a step of runs with up to `MOST_RANKS` ranks. A line is on disk when
    `write` returns."""

    def __init__(self, run_dir: Path):
        self._file = open(run_dir / RANKS_FILE, "a", encoding="utf-8")

    def write(self, line: RankLine) -> None:
        """Record one step."""
        ranks = sum(len(next(iter(of.values()), ())) for of in line.seconds.values())
        if line.step % max(1, ceil(ranks / MOST_RANKS)) == 0:
            self._file.write(json.dumps(json_safe(asdict(line)), separators=(",", ":")) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file. May be called again."""
        self._file.close()


def keep_rank_lines(run_dir: Path, last: int) -> None:
    """Cut off what a stopped run wrote after step `last`."""
    path = run_dir / RANKS_FILE
    if path.exists():
        with replaced(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
            for text, line in _whole_lines(path):
                if line["step"] <= last:
                    file.write(text)


def read_rank_lines(run_dir: Path) -> list[RankLine]:
    """All lines, oldest first, without those that are not whole; none where there is no such file."""
    path = run_dir / RANKS_FILE
    known = {one.name for one in fields(RankLine)}
    lines = _whole_lines(path) if path.exists() else ()
    return [
        RankLine(**{key: from_json(value) if key == "losses" else value for key, value in line.items() if key in known})
        for _, line in lines
    ]


def _whole_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each as it is written and as it is meant, one at a time: of a long run all would be gigabytes."""
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            try:
                line = json.loads(text)
            except ValueError:  # the run was killed while it wrote this
                continue
            if text.endswith("\n") and isinstance(line, dict) and isinstance(line.get("step"), int):
                yield text, line


SLOW = 1.2  # times the median of the peers
STEPS = 50  # in a row, that count
TOGETHER = 5  # steps, in the mean: one in which something else took a core, or the others, begins no count anew

Pace = dict[str, float | str]


@dataclass(frozen=True)
class RankShare:
    """A rank's part of a step. who: `text rank 1`. seconds: in which it computed, without those in collectives, where
    it waits for others. work: what it had to compute, relative to its stage's other ranks."""

    who: str
    seconds: float
    work: float


def pace(shares: Sequence[RankShare], predicted_s: float | None) -> Pace | None:
    """Of a stage's ranks the least, the median and the most of seconds / predicted seconds, and which rank has the
    most; None where none has work. predicted_s: of the mean rank; None: what the mean rank took."""
    busy = [share for share in shares if share.work > 0]
    if not busy:
        return None
    mean_s = predicted_s or mean(share.seconds for share in shares)
    mean_work = mean(share.work for share in shares)
    if mean_s <= 0:
        return None
    ratios = {share.who: share.seconds * mean_work / (mean_s * share.work) for share in busy}
    slowest = max(ratios, key=lambda who: ratios[who])
    return {"min": min(ratios.values()), "median": median(ratios.values()), "max": ratios[slowest], "rank": slowest}


class Stragglers:
    """One run's. A rank is slow after a step where both its seconds and its seconds over work, of the last `TOGETHER`
    steps, are beyond `SLOW` times the median of its stage's other ranks. A rank with more work has more of the one, one
    with less work, whose fixed costs weigh more, has more of the other: uneven work alone gives no rank both."""

    def __init__(self) -> None:
        self.named: dict[str, str] = {}  # the message about each
        self._recent: dict[str, deque[tuple[float, float]]] = {}
        self._in_a_row: dict[str, int] = {}

    def add(self, stages: Mapping[str, Sequence[RankShare]]) -> list[str]:
        """A step has ended. Messages about ranks that were slow after `STEPS` steps in a row, each once. A step in
        which a rank or all of its peers had no work does not count."""
        messages = []
        for shares in stages.values():
            working = [self._together(share) for share in shares if share.work > 0]
            if len(working) < 2:
                continue
            seconds = _Peers([share.seconds for share in working])
            each = _Peers([share.seconds / share.work for share in working])
            for own in working:
                peers_s, peers_each = seconds.median(own.seconds), each.median(own.seconds / own.work)
                slow = own.seconds > SLOW * peers_s and own.seconds / own.work > SLOW * peers_each
                in_a_row = self._in_a_row.get(own.who, 0) + 1 if slow else 0
                self._in_a_row[own.who] = in_a_row
                if in_a_row >= STEPS and own.who not in self.named:
                    self.named[own.who] = _message(own, peers_s)
                    messages.append(self.named[own.who])
        return messages

    def _together(self, share: RankShare) -> RankShare:
        """Of the last steps in which it had work, in the mean."""
        recent = self._recent.setdefault(share.who, deque(maxlen=TOGETHER))
        recent.append((share.seconds, share.work))
        return RankShare(share.who, *(sum(of) / len(recent) for of in zip(*recent, strict=True)))


class _Peers:
    """A stage's values, sorted once: for a median per rank, each sorting the others' would take longer than a step of
    a thousand ranks may."""

    def __init__(self, values: Sequence[float]):
        """values: of two ranks or more."""
        self._sorted = sorted(values)

    def median(self, own: float) -> float:
        """Of all values but one that equals `own`, which is among them."""
        at, middle = bisect_left(self._sorted, own), len(self._sorted) // 2
        if len(self._sorted) % 2 == 0:  # an odd number of others
            return self._without(at, middle - 1)
        return (self._without(at, middle - 1) + self._without(at, middle)) / 2

    def _without(self, at: int, index: int) -> float:
        """The value at `index` where the one at `at` is left out."""
        return self._sorted[index if index < at else index + 1]


def _message(share: RankShare, peers_s: float) -> str:
    return (
        f"{share.who} is slow: for {STEPS} steps in a row it has computed for more than {SLOW:g} times as long as the "
        f"median of its peers, for as much work (now {share.seconds:.3g} s, they {peers_s:.3g} s). Each step waits for "
        "it. Its log's first line names its node: see what else runs there, its clocks and its temperature, or run "
        "without that device"
    )


EVENTS_FILE = "events.jsonl"
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
        path = run_dir / EVENTS_FILE
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
    path, found = run_dir / EVENTS_FILE, []
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
