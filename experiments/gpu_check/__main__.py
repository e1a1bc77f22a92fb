"""`python -m experiments.gpu_check [--device cuda] [--out FILE] [--only WORD …] [--from SECTION]`: does dhp do on a GPU
what it should, and how fast?

A JSON object a row, printed and appended to `--out` as soon as it is there. Status 0: all is right; 1: something
deviates, failed or found no time; 2: there is no device."""

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from shutil import disk_usage
from typing import Any

from experiments.gpu_check.rows import HERE, SECTIONS, UNANSWERED, Row, Section
from experiments.gpu_check.workshop import SERVE, Workshop, serve

RIGHT, WRONG, NO_DEVICE = 0, 1, 2
LIMIT_S = 730.0
WARM = f"{HERE}.warm"
MEMORY, ROOM = Path("/dev/shm"), 40 << 30  # of bytes: a model's weights, and what runs hand over
PATIENCE = {"cuda": 1.0, "cpu": 20.0}  # times a section's limit: on a CPU rows are tried, not timed
KINDS = ("right", "deviating", "failed", "skipped", "no time")


class Results:
    """What is appended to the file. run: what the rows of one run have in common; None: this moment."""

    def __init__(self, out: Path, run: str | None = None):
        out.parent.mkdir(parents=True, exist_ok=True)
        self._out, self._run = out, run or datetime.now(UTC).isoformat(timespec="seconds")

    def write(self, fields: dict[str, Any]) -> None:
        """One row, told to the terminal and to the file at once."""
        line = json.dumps({"run": self._run} | fields)
        print(line, flush=True)
        with self._out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def last_run(out: Path) -> str | None:
    """The run that the last row of the file belongs to; None where there is none."""
    lines = out.read_text(encoding="utf-8").splitlines() if out.is_file() else []
    return json.loads(lines[-1])["run"] if lines else None


def choose(only: Sequence[str], begin: str | None) -> list[Section]:
    """What is asked for, behind the first row, on which all others depend. only: beginnings of names of rows, alone
    or behind their section's; begin: the section to begin with."""
    begins, first = tuple(only), SECTIONS[0].rows[0]
    skipped = [section.name for section in SECTIONS].index(begin) if begin else 0

    def fits(number: int, section: Section, row: Row) -> bool:
        named = f"{section.name}: {row.name}".startswith(begins) or row.name.startswith(begins)
        return row is first or (number >= skipped and named)

    chosen = (
        replace(one, rows=tuple(row for row in one.rows if fits(number, one, row)))
        for number, one in enumerate(SECTIONS)
    )
    return [section for section in chosen if section.rows]


def check_sections(
    sections: Sequence[Section], device: str, results: Results, limit_s: float = LIMIT_S, patience: float | None = None
) -> int:
    """Run the rows in order, write them, what no GPU alone can answer, and totals; the status to exit with. limit_s:
    seconds for all of them. patience: times a section's limit; None: the device's."""
    begin = time.perf_counter()
    totals: dict[str, list[str]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory(dir=_roomy()) as folder:
        warm = WARM if any(row.module.startswith(HERE) for section in sections for row in section.rows) else None
        workshop = Workshop(device, Path(folder), warm)
        try:
            for section, row, left in _in_time(sections, patience or PATIENCE[device], begin + limit_s):
                found = {"no time": True} if left <= 0 else workshop.run(row, left)
                totals[_kind(found)].append(f"{section}: {row.name}")
                results.write({"section": section, "row": row.name, **found})
                if found.get("serves") is False:
                    break
        finally:
            workshop.close()
    status = WRONG if totals["deviating"] or totals["failed"] or totals["no time"] else RIGHT
    told = {kind: names if kind != "right" else len(names) for kind, names in totals.items()}
    seconds = round(time.perf_counter() - begin, 2)
    results.write({"section": "end", "row": "totals", "device": device, **told, "seconds": seconds, "status": status})
    results.write({"section": "end", "row": "unanswered", "told": list(UNANSWERED)})
    return status


def _in_time(sections: Sequence[Section], patience: float, end: float) -> Iterator[tuple[str, Row, float]]:
    """Each row with its section's name and the seconds that it has: what is left of its section and of all."""
    for section in sections:
        section_end = time.perf_counter() + section.limit_s * patience
        for row in section.rows:
            yield section.name, row, min(section_end, end) - time.perf_counter()


def _kind(found: dict[str, Any]) -> str:
    if "error" in found:
        return "failed"
    if "skipped" in found or "no time" in found:
        return "skipped" if "skipped" in found else "no time"
    return "right" if found["ok"] else "deviating"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--only", nargs="+", default=[""], help="rows that begin so, as `RMS`, `waits` or `waits: 1+1`")
    parser.add_argument("--from", dest="begin", choices=[one.name for one in SECTIONS], help="go on with this section")
    parser.add_argument("--limit", type=float, help="seconds for all rows together")
    parser.add_argument("--patience", type=float, help="times each section's own limit")
    parser.add_argument("--out", type=Path, default=Path("results/gpu.jsonl"))
    parser.add_argument(SERVE, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--warm", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is not None:
        serve(given.device, given.serve, given.warm)
        return RIGHT
    results = Results(given.out, last_run(given.out) if given.begin else None)
    if given.device == "cuda" and not _has_gpu():
        told = "no CUDA device; --device cpu tries the rows themselves"
        results.write({"section": "end", "row": "totals", "error": told})
        return NO_DEVICE
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that processes are ended
    limit_s = given.limit or LIMIT_S * PATIENCE[given.device]
    return check_sections(choose(given.only, given.begin), given.device, results, limit_s, given.patience)


def _roomy() -> Path | None:
    """Where weights are written and read the fastest: the memory's file system, if it has room; None: as usual."""
    return MEMORY if MEMORY.is_dir() and disk_usage(MEMORY).free > ROOM else None


def _has_gpu() -> bool:
    import torch  # not in this process where there is no need: what it breaks is a row's failure

    return torch.cuda.is_available()


if __name__ == "__main__":
    raise SystemExit(main())
