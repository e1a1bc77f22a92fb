"""Bars of patches a second: a panel a model, a group a picture's length, a bar a layout with its batch above it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.published.canvas import GRID, SIDE, TOP, Canvas

COLOURS = {"SP+TP": "#00798c", "TP": "#edae49", "ZeRO-3": "#d1495b"}
HEAD = 1.12  # of the highest bar: the panel's height
Row = dict[str, Any]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    canvas = Canvas(len(models))
    left = canvas.left(0)
    canvas.text(left, 10, "patches a second; above a bar its batch; x: out of memory")
    for at, (layout, colour) in enumerate(COLOURS.items()):
        canvas.dot(left + 10 + at * 80, 35, colour)
        canvas.text(left + 20 + at * 80, 28, layout)
    for at, model in enumerate(models):
        _panel(canvas, canvas.left(at), model, [row for row in rows if row["model"] == model])
    canvas.save(path)


def _panel(canvas: Canvas, left: float, model: str, rows: Sequence[Row]) -> None:
    rows = [row for row in rows if row["steps"] or not row["fits"]]  # others were planned, and not timed
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    most = HEAD * max((row["patches_per_s"] or 0.0 for row in rows), default=1.0) or 1.0
    canvas.text(left, TOP - 20, f"Qwen2.5-VL-{model}, scaled; {rows[0]['budget_mib']:.0f} MiB a device")
    canvas.frame(left)
    for share in (0.25, 0.5, 0.75):
        y = TOP + SIDE * (1 - share)
        canvas.line([(left, y), (left + SIDE, y)], GRID)
        canvas.text(left - 46, y - 7, f"{share * most:,.0f}")
    group = SIDE / len(sizes)
    bar = 0.8 * group / len(COLOURS)
    for at, size in enumerate(sizes):
        canvas.text(left + group * at + group / 2 - 10, TOP + SIDE + 4, size)
        for layout, row in {row["layout"]: row for row in rows if row["size"] == size}.items():  # the last of each
            across = left + group * at + 0.1 * group + bar * list(COLOURS).index(layout)
            high = SIDE * (row["patches_per_s"] or 0.0) / most
            if high:
                canvas.box(across, TOP + SIDE - high, bar - 1, high, COLOURS[layout])
            canvas.text(across + bar / 2 - 3, TOP + SIDE - high - 14, str(row["batch"]) if high else "x")
