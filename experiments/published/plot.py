"""Predicted figures beside published ones, a panel a source, both axes logarithmic; and a panel of plans."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from experiments.published.canvas import GRID, SIDE, TOP, Canvas
from experiments.published.lengths_panel import curves, draw_lengths
from experiments.published.tables import FIT, HELD_OUT, PLANNED, UNEXPLAINED, Row

COLOURS = {FIT: "#202020", HELD_OUT: "#00798c", UNEXPLAINED: "#d1495b"}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG of all rows that have two figures, and of plans where there are any."""
    panels: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["error"] is not None:
            ratios = row["group"] == "ratios"
            panels.setdefault(
                (row["source"].split(" (")[0].split(",")[0], "ratio" if ratios else _unit(row)), []
            ).append(row)
    with_plans = any(row["role"] == PLANNED for row in rows)
    canvas = Canvas(len(panels) + with_plans)
    left = canvas.left(0)
    canvas.text(left, 10, "predicted (up) beside published (across); the line: equal")
    for at, (role, colour) in enumerate(COLOURS.items()):
        canvas.dot(left + 380 + at * 110, 17, colour)
        canvas.text(left + 390 + at * 110, 10, role.replace("_", " "))
    for at, ((source, unit), own) in enumerate(panels.items()):
        _panel(canvas, canvas.left(at), f"{source}: {unit}", own)
    if with_plans:
        draw_lengths(canvas, canvas.left(len(panels)), curves(rows))
    canvas.save(path)


def _unit(row: Row) -> str:
    return str(row["unit"].split(";")[0].split(",")[0].split(" for ")[0])


def _panel(canvas: Canvas, left: float, title: str, rows: Sequence[Row]) -> None:
    figures = [row[key] for row in rows for key in ("published", "predicted")]
    low, high = math.log(min(figures) / 1.15), math.log(max(figures) * 1.15)

    def across(value: float) -> float:
        return SIDE * (math.log(value) - low) / (high - low)

    canvas.text(left, TOP - 20, title)
    canvas.frame(left)
    canvas.line([(left, TOP + SIDE), (left + SIDE, TOP)], GRID)
    for tick in _ticks(math.exp(low), math.exp(high)):
        canvas.text(left + across(tick) - 8, TOP + SIDE + 4, f"{tick:g}")
        canvas.text(left - 38, TOP + SIDE - across(tick) - 7, f"{tick:g}")
    for row in rows:
        canvas.dot(left + across(row["published"]), TOP + SIDE - across(row["predicted"]), COLOURS[row["role"]])


def _ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [first * 10.0**power for power in powers for first in (1, 2, 3, 5) if low < first * 10.0**power < high]
