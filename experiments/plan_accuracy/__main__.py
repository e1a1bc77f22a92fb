"""`python -m experiments.plan_accuracy [--only memory|time] [--out FILE] [--plot FILE]`: plans beside runs."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.plan_accuracy.memory import memory_rows, memory_scores

MODES = ("memory", "time")


def all_rows(modes: Sequence[str], models: Path, cases: list[str] | None) -> Iterator[dict[str, Any]]:
    """Rows of these modes, and behind each mode's its scores."""
    if "memory" in modes:
        rows = []
        for row in memory_rows(models, cases):
            rows.append(row)
            yield row
        yield from memory_scores(rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a JSON line for each row."""
    parser = argparse.ArgumentParser(prog="python -m experiments.plan_accuracy", description=__doc__)
    parser.add_argument("--only", choices=MODES)
    parser.add_argument("--cases", nargs="+", help="of memory, by name; all where none is given")
    parser.add_argument("--out", type=Path, help="file to which the same lines are added")
    asked = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        for row in all_rows([asked.only] if asked.only else MODES, Path(folder), asked.cases):
            line = json.dumps(row | {"command": "python -m experiments.plan_accuracy"}, ensure_ascii=False)
            print(line, flush=True)
            if asked.out:
                with asked.out.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")


if __name__ == "__main__":
    main()
