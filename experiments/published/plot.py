"""Predicted figures beside published ones, a panel a source, both axes logarithmic, drawn with Pillow."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from experiments.published.tables import FIT, HELD_OUT, UNEXPLAINED, Row

FINER = 3  # the picture is drawn larger and reduced, for smooth letters
SIDE, LEFT, TOP, GAP, BOTTOM = 270, 56, 64, 70, 40  # pixels of a panel and around it
DOT = 4
INK, GRID = "#202020", "#d8d8d8"
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
    size = (LEFT + len(panels) * (SIDE + GAP), TOP + SIDE + BOTTOM)
    image = Image.new("RGB", (FINER * size[0], FINER * size[1]), "white")
    canvas = ImageDraw.Draw(image)
    _text(canvas, LEFT, 10, "predicted (up) beside published (across); the line: equal")
    for at, (role, colour) in enumerate(COLOURS.items()):
        _dot(canvas, LEFT + 380 + at * 110, 17, colour)
        _text(canvas, LEFT + 390 + at * 110, 10, role.replace("_", " "))
    for at, ((source, unit), own) in enumerate(panels.items()):
        _panel(canvas, LEFT + at * (SIDE + GAP), f"{source}: {unit}", own)
    image.resize(size, Image.Resampling.LANCZOS).save(path)


def _unit(row: Row) -> str:
    return str(row["unit"].split(";")[0].split(",")[0].split(" for ")[0])


def _panel(canvas: ImageDraw.ImageDraw, left: float, title: str, rows: Sequence[Row]) -> None:
    figures = [row[key] for row in rows for key in ("published", "predicted")]
    low, high = math.log(min(figures) / 1.15), math.log(max(figures) * 1.15)

    def across(value: float) -> float:
        return SIDE * (math.log(value) - low) / (high - low)

    _text(canvas, left, TOP - 20, title)
    canvas.rectangle([FINER * v for v in (left, TOP, left + SIDE, TOP + SIDE)], outline=GRID, width=FINER)
    canvas.line([FINER * v for v in (left, TOP + SIDE, left + SIDE, TOP)], fill=GRID, width=FINER)
    for tick in _ticks(math.exp(low), math.exp(high)):
        _text(canvas, left + across(tick) - 8, TOP + SIDE + 4, f"{tick:g}")
        _text(canvas, left - 38, TOP + SIDE - across(tick) - 7, f"{tick:g}")
    for row in rows:
        _dot(canvas, left + across(row["published"]), TOP + SIDE - across(row["predicted"]), COLOURS[row["role"]])


def _ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [first * 10.0**power for power in powers for first in (1, 2, 3, 5) if low < first * 10.0**power < high]


def _dot(canvas: ImageDraw.ImageDraw, x: float, y: float, colour: str) -> None:
    canvas.ellipse([FINER * v for v in (x - DOT, y - DOT, x + DOT, y + DOT)], fill=colour)


def _text(canvas: ImageDraw.ImageDraw, x: float, y: float, text: str) -> None:
    canvas.text((FINER * x, FINER * y), text, INK, ImageFont.load_default(FINER * 11))
