"""Predicted figures beside published ones, a panel a source, both axes logarithmic."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.published.canvas import Canvas, beside_panel
from experiments.published.tables import FIT, HELD_OUT, UNEXPLAINED, Row

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
