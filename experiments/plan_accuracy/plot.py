"""Predicted figures beside measured ones, a panel a kind, both axes logarithmic, drawn with Pillow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, log
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

FINER = 3  # the picture is drawn larger and reduced, for smooth letters
SIDE, LEFT, TOP, GAP, BOTTOM = 300, 60, 64, 70, 40  # pixels of a panel and around it
DOT = 4
INK, GRID = "#202020", "#d8d8d8"
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
    size = (LEFT + max(1, len(panels)) * (SIDE + GAP), TOP + SIDE + BOTTOM)
    image = Image.new("RGB", (FINER * size[0], FINER * size[1]), "white")
    canvas = ImageDraw.Draw(image)
    _text(canvas, LEFT, 10, "predicted (up) beside measured (across); the line: equal")
    for at, (title, own) in enumerate(panels.items()):
        _panel(canvas, LEFT + at * (SIDE + GAP), title, own)
    image.resize(size, Image.Resampling.LANCZOS).save(path)


def _panel(canvas: ImageDraw.ImageDraw, left: float, title: str, points: Points) -> None:
    figures = [value for own in points.values() for pair in own for value in pair]
    low, high = log(min(figures) / 1.15), log(max(figures) * 1.15)

    def across(value: float) -> float:
        return SIDE * (log(value) - low) / (high - low)

    _text(canvas, left, TOP - 20, title)
    canvas.rectangle([FINER * v for v in (left, TOP, left + SIDE, TOP + SIDE)], outline=GRID, width=FINER)
    canvas.line([FINER * v for v in (left, TOP + SIDE, left + SIDE, TOP)], fill=GRID, width=FINER)
    for tick in (first * 10.0**power for power in range(-3, 5) for first in (1, 2, 5)):
        if exp(low) < tick < exp(high):
            _text(canvas, left + across(tick) - 8, TOP + SIDE + 4, f"{tick:g}")
            _text(canvas, left - 34, TOP + SIDE - across(tick) - 7, f"{tick:g}")
    for at, (name, own) in enumerate(points.items()):
        colour = COLOURS[at % len(COLOURS)]
        _dot(canvas, left + 12, TOP + 13 + 15 * at, colour)
        _text(canvas, left + 20, TOP + 6 + 15 * at, name)
        for measured, predicted in own:
            _dot(canvas, left + across(measured), TOP + SIDE - across(predicted), colour)


def _dot(canvas: ImageDraw.ImageDraw, x: float, y: float, colour: str) -> None:
    canvas.ellipse([FINER * v for v in (x - DOT, y - DOT, x + DOT, y + DOT)], fill=colour)


def _text(canvas: ImageDraw.ImageDraw, x: float, y: float, text: str) -> None:
    canvas.text((FINER * x, FINER * y), text, INK, ImageFont.load_default(FINER * 11))
