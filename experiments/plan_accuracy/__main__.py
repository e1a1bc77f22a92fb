"""`python -m experiments.plan_accuracy [--only memory|time] [--out FILE] [--plot FILE]`: plans beside runs."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from experiments.plan_accuracy.layout import CASES, GROUPS
from experiments.plan_accuracy.measured import ROUNDS, memory_rows, memory_scores, time_rows, time_scores
from experiments.published.canvas import TOP, Canvas, beside_panel

COLOURS = ("#00798c", "#d1495b", "#edae49", "#66a182", "#2e4057")
Points = Mapping[str, Sequence[tuple[float, float]]]  # by name, measured and predicted


def panels_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Points]:
    """By title."""
    memory = [row for row in rows if row["mode"] == "memory" and "case" in row]
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for count in ("saved", "live"):
        for row in memory:
            if row[f"{count}_measured"]:
                part = str(row["stage"]).partition(".")[0]
                pair = (row[f"{count}_measured"] / 1e6, row[f"{count}_predicted"] / 1e6)
                found.setdefault(f"{count} bytes, MB", {}).setdefault(part, []).append(pair)
    for row in rows:
        if "measured_s" in row:
            pair = (row["measured_s"], row["predicted_s"])
            found.setdefault("seconds a step", {}).setdefault(row["group"], []).append(pair)
    return {title: dict(own) for title, own in found.items()}


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a PNG."""
    panels = panels_of(rows)
    canvas = Canvas(max(1, len(panels)))
    canvas.text(canvas.left(0), 10, "predicted (up) beside measured (across); the line: equal")
    for at, (title, own) in enumerate(panels.items()):
        left, colours = canvas.left(at), dict(zip(own, cycle(COLOURS)))
        beside_panel(canvas, left, title, [(*pair, colours[name]) for name, pairs in own.items() for pair in pairs])
        for number, (name, colour) in enumerate(colours.items()):
            canvas.dot(left + 12, TOP + 13 + 15 * number, colour)
            canvas.text(left + 20, TOP + 6 + 15 * number, name)
    canvas.save(path)


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
            timed.append(row)
            yield row
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
    asked = parser.parse_args(arguments)
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
