"""`python -m experiments.plan_accuracy [--only memory|time] [--out FILE] [--plot FILE]`: plans beside runs."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.plan_accuracy.cases import CASES
from experiments.plan_accuracy.groups import GROUPS
from experiments.plan_accuracy.memory import memory_rows, memory_scores
from experiments.plan_accuracy.plot import draw
from experiments.plan_accuracy.seconds import ROUNDS, time_rows, time_scores
from experiments.plan_accuracy.slow_link import limit, run_inside

MEMORY, TIME = MODES = ("memory", "time")


def all_rows(asked: argparse.Namespace, models: Path) -> Iterator[dict[str, Any]]:
    """Rows of the modes that are asked for, and behind each mode's its scores."""
    rows: list[dict[str, Any]] = []
    if asked.only != TIME:
        for row in memory_rows(models, asked.cases):
            rows.append(row)
            yield row
        yield from memory_scores(rows)
    if asked.only != MEMORY:
        timed = []
        for row in time_rows(models, asked.groups, asked.rounds):
            slow = {} if asked.mbit is None else {"mbit": asked.mbit, "group": f"{row['group']}, slow link"}
            timed.append(row | slow)
            yield timed[-1]
        yield from time_scores(timed)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a JSON line for each row."""
    parser = argparse.ArgumentParser(prog="python -m experiments.plan_accuracy", description=__doc__)
    parser.add_argument("--only", choices=MODES)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), help="of memory")
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), help="of time")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of time: visits of each layout")
    parser.add_argument("--out", type=Path, help="file to which the same lines are added")
    parser.add_argument("--plot", type=Path, help="PNG of predicted figures over measured ones; of all rows of --out")
    parser.add_argument("--mbit", type=int, help="of time, as root: a link of so many Mbit/s between ranks")
    asked = parser.parse_args(arguments)
    if asked.mbit is not None:
        run_inside(sys.argv[1:] if arguments is None else arguments)
        limit(asked.mbit)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in all_rows(asked, Path(folder)):
            rows.append(row | {"command": "python -m experiments.plan_accuracy"})
            line = json.dumps(rows[-1], ensure_ascii=False)
            print(line, flush=True)
            if asked.out:
                with asked.out.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
    if asked.plot:
        draw(rows if asked.out is None else [json.loads(line) for line in asked.out.open(encoding="utf-8")], asked.plot)


if __name__ == "__main__":
    main()
