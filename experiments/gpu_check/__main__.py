"""`python -m experiments.gpu_check [--device cuda] [--out FILE] [--only WORD …]`: does dhp do on a GPU what it should?

A JSON object a row, printed and appended to `--out` as soon as it is there. Status 0: all is right; 1: something
deviates, failed or found no time; 2: there is no device.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from experiments.gpu_check.rows import ROWS, Row
from experiments.gpu_check.workshop import SERVE, Workshop, serve

RIGHT, WRONG, NO_DEVICE = 0, 1, 2
ROW_LIMIT_S, LIMIT_S = 120.0, 450.0
KINDS = ("right", "deviating", "failed", "skipped", "no time")


class Results:
    """What is appended to the file."""

    def __init__(self, out: Path):
        out.parent.mkdir(parents=True, exist_ok=True)
        self._out, self._run = out, datetime.now(UTC).isoformat(timespec="seconds")

    def write(self, fields: dict[str, Any]) -> None:
        """One row, told to the terminal and to the file at once."""
        line = json.dumps({"run": self._run} | fields)
        print(line, flush=True)
        with self._out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


def check_rows(
    rows: Sequence[Row], device: str, out: Path, limit_s: float = LIMIT_S, row_limit_s: float = ROW_LIMIT_S
) -> int:
    """Run the rows in order, write them and their totals; the status to exit with. Limits in seconds."""
    results, begin = Results(out), time.perf_counter()
    totals: dict[str, list[str]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        workshop = Workshop(device, Path(folder))
        try:
            for row in rows:
                left = limit_s - (time.perf_counter() - begin)
                found = {"no time": True} if left <= 0 else workshop.run(row, min(left, row_limit_s))
                totals[_kind(found)].append(row.name)
                results.write({"row": row.name, **found})
                if found.get("serves") is False:
                    break
        finally:
            workshop.close()
    status = WRONG if totals["deviating"] or totals["failed"] or totals["no time"] else RIGHT
    told = {kind: names if kind != "right" else len(names) for kind, names in totals.items()}
    seconds = round(time.perf_counter() - begin, 2)
    results.write({"row": "totals", "device": device, **told, "seconds": seconds, "status": status})
    return status


def _kind(found: dict[str, Any]) -> str:
    if "error" in found:
        return "failed"
    if "skipped" in found or "no time" in found:
        return "skipped" if "skipped" in found else "no time"
    return "right" if found["ok"] else "deviating"


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--only", nargs="+", default=[""], help="rows whose names begin with one of these")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for all rows together")
    parser.add_argument("--out", type=Path, default=Path("results/gpu.jsonl"))
    parser.add_argument(SERVE, type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve is not None:
        serve(given.device, given.serve)
        return RIGHT
    if given.device == "cuda" and not _has_gpu():
        Results(given.out).write({"row": "totals", "error": "no CUDA device; --device cpu tries the rows themselves"})
        return NO_DEVICE
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that processes are ended
    first, *others = ROWS  # what there is: the others ask nothing of it
    rows = [first, *(row for row in others if row.name.startswith(tuple(given.only)))]
    return check_rows(rows, given.device, given.out, given.limit)


def _has_gpu() -> bool:
    import torch  # not in this process where there is no need: what it breaks is a row's failure

    return torch.cuda.is_available()


if __name__ == "__main__":
    raise SystemExit(main())
