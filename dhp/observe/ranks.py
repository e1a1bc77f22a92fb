"""What each rank did in each step: a line a step in ranks.jsonl, for the report."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dhp.core.files import replaced
from dhp.core.reports import StageReport
from dhp.core.text import from_json, json_safe

FILE = "ranks.jsonl"
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
        self._file = open(run_dir / FILE, "a", encoding="utf-8")

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
    path = run_dir / FILE
    if path.exists():
        with replaced(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
            for text, line in _whole_lines(path):
                if line["step"] <= last:
                    file.write(text)


def read_rank_lines(run_dir: Path) -> list[RankLine]:
    """All lines, oldest first, without those that are not whole; none where there is no such file."""
    path = run_dir / FILE
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
