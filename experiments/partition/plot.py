"""Replayed steps beside the exact cut's, a bar for each method and setting, drawn with Pillow."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

FINER = 3  # the picture is drawn larger and reduced, for smooth letters
WIDTH, LEFT, RIGHT, TOP = 760, 150, 60, 40  # pixels of the picture and its margins
BAR, GAP, HEADING = 18, 6, 26  # pixels
COLOURS = {"parameters": "#4c4c4c", "layers": "#d1495b", "profile": "#edae49", "bmp by forward": "#66a182",
           "bmp by work": "#8a5a9e", "exact": "#00798c"}  # fmt: skip
INK, GRID = "#202020", "#d8d8d8"
Row = dict[str, Any]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG of the replayed rows. Raises ValueError where there are none."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row["question"] == "replay":
            heading = f"{row['stages']} stages, {row['micro_batches']} micro-batches, {row['frozen']} frozen"
            groups.setdefault(heading, []).append(row)
    if not groups:
        raise ValueError("no row has the question replay")
    most = max(row["to_exact"] for own in groups.values() for row in own)
    height = TOP + sum(HEADING + len(own) * (BAR + GAP) for own in groups.values()) + GAP
    image = Image.new("RGB", (FINER * WIDTH, FINER * height), "white")
    canvas = ImageDraw.Draw(image)
    _text(canvas, 12, 12, "seconds of a step, replayed, beside those of the exact cut (1.00)")
    scale, at = (WIDTH - LEFT - RIGHT) / most, TOP
    _line(canvas, LEFT + scale, TOP, height - GAP)
    for heading, own in groups.items():
        _text(canvas, 12, at + 6, heading)
        at += HEADING
        for row in own:
            _draw_bar(canvas, at, row, scale)
            at += BAR + GAP
    image.resize((WIDTH, height), Image.Resampling.LANCZOS).save(path)


def _draw_bar(canvas: ImageDraw.ImageDraw, at: float, row: Row, scale: float) -> None:
    end = LEFT + scale * row["to_exact"]
    canvas.rectangle([FINER * value for value in (LEFT, at, end, at + BAR)], fill=COLOURS[row["method"]])
    _text(canvas, 24, at + 3, row["method"])
    _text(canvas, end + 6, at + 3, f"{row['to_exact']:.2f}")


def _line(canvas: ImageDraw.ImageDraw, x: float, top: float, bottom: float) -> None:
    canvas.line([FINER * value for value in (x, top, x, bottom)], fill=GRID, width=FINER)


def _text(canvas: ImageDraw.ImageDraw, x: float, y: float, text: str) -> None:
    canvas.text((FINER * x, FINER * y), text, INK, ImageFont.load_default(FINER * 12))
