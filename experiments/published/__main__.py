"""`python -m experiments.published [--out FILE] [--plot FILE]`: simulated steps beside published tables."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from experiments.published.canvas import Canvas, beside_panel
from experiments.published.machine import FIT, HELD_OUT, UNEXPLAINED, Row
from experiments.published.omnibal import omnibal_rows
from experiments.published.sequences import longest_rows, longvila_rows, ray_rows

COLOURS = {FIT: "#202020", HELD_OUT: "#00798c", UNEXPLAINED: "#d1495b"}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG of all rows that have two figures."""
    panels: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["error"] is not None:
            ratios = row["group"] == "ratios"
            panels.setdefault(
                (row["source"].split(" (")[0].split(",")[0], "ratio" if ratios else _unit(row)), []
            ).append(row)
    canvas = Canvas(len(panels))
    left = canvas.left(0)
    canvas.text(left, 10, "predicted (up) beside published (across); the line: equal")
    for at, (role, colour) in enumerate(COLOURS.items()):
        canvas.dot(left + 380 + at * 110, 17, colour)
        canvas.text(left + 390 + at * 110, 10, role.replace("_", " "))
    for at, ((source, unit), own) in enumerate(panels.items()):
        points = [(row["published"], row["predicted"], COLOURS[row["role"]]) for row in own]
        beside_panel(canvas, canvas.left(at), f"{source}: {unit}", points)
    canvas.save(path)


def _unit(row: Row) -> str:
    return str(row["unit"].split(";")[0].split(",")[0].split(" for ")[0])


def all_rows() -> tuple[list[Row], list[Row]]:
    """Rows of all published tables, and their scores."""
    cells, of_cells, fitted = ray_rows()
    long, of_long, of_steps = longvila_rows(fitted)
    days, of_days = omnibal_rows()
    return [*cells, *long, *longest_rows(of_steps), *days], [of_cells, *of_long, *of_days]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.published", description=__doc__)
    parser.add_argument("--out", type=Path, help="file for the same lines")
    parser.add_argument("--plot", type=Path, help="PNG of predicted figures beside published ones")
    asked = parser.parse_args(arguments)
    rows, scores = all_rows()
    command = {"command": "python -m experiments.published"}
    lines = [json.dumps(row | command, ensure_ascii=False) for row in [*rows, *scores]]
    print("\n".join(lines))
    if asked.out:
        asked.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if asked.plot:
        draw(rows, asked.plot)


if __name__ == "__main__":
    main()
