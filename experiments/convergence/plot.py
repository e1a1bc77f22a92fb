"""Held-out loss over samples seen, a curve for each method, drawn with Pillow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

from PIL import Image, ImageDraw, ImageFont

from experiments.convergence.methods import base_of
from experiments.convergence.summary import Row, methods_of

Point = tuple[float, float]

SIZE, FINER = (860, 520), 3  # pixels of the picture; it is drawn larger and reduced, for smooth lines
LEFT, RIGHT, TOP, BOTTOM = 70, 150, 40, 60  # margins, pixels
COLOURS = {"random": "#4c4c4c", "isf": "#d1495b", "balanced": "#00798c", "sequence": "#edae49"}
OTHER = "#8a5a9e"
WIDTHS = (6.0, 3.5, 2.5, 1.5)  # curves that lie on one another stay visible
BAND, GRID, INK = "#e4e4e4", "#d8d8d8", "#202020"
STEPS = (1, 2, 5)


@dataclass(frozen=True)
class Axes:
    """Where values lie in the picture."""

    x: Point  # lowest, highest
    y: Point

    def at(self, x: float, y: float) -> Point:
        """Pixels, of the larger drawing."""
        width, height = SIZE[0] - LEFT - RIGHT, SIZE[1] - TOP - BOTTOM
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return FINER * (LEFT + across * width), FINER * (TOP + (1 - up) * height)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG: for each method the mean over seeds, and grey from the lowest to the highest seed of the first one's
    base."""
    curves = {method: _curve(rows, method) for method in methods_of(rows)}
    base = base_of(next(iter(curves)))
    axes = Axes((0, max(row["samples"] for row in rows)), _range([row["heldout_loss"] for row in rows]))
    image = Image.new("RGB", tuple(FINER * side for side in SIZE), "white")
    canvas = ImageDraw.Draw(image)
    _draw_band(canvas, axes, curves.get(base, []))
    _draw_grid(canvas, axes)
    for number, (method, points) in enumerate(curves.items()):
        width = WIDTHS[min(number, len(WIDTHS) - 1)]
        _draw_curve(canvas, axes, [(x, mean(ys)) for x, ys in points], COLOURS.get(method, OTHER), width)
        _draw_label(canvas, number, method)
    _text(canvas, LEFT, 12, f"held-out loss, nats a token (mean over seeds; grey: all seeds of {base})")
    _text(canvas, (SIZE[0] - RIGHT + LEFT) / 2, SIZE[1] - 18, "samples seen", "mm")
    image.resize(SIZE, Image.Resampling.LANCZOS).save(path)


def _curve(rows: Sequence[Row], method: str) -> list[tuple[float, list[float]]]:
    """For each checkpoint in order: mean of the samples seen, and the loss of every seed."""
    by_seed: dict[int, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["step"]):
        if row["method"] == method:
            by_seed.setdefault(row["seed"], []).append(row)
    together = zip(*by_seed.values(), strict=False)  # a seed's epoch may have a checkpoint more than another's
    return [(mean(row["samples"] for row in at), [row["heldout_loss"] for row in at]) for at in together]


def _range(values: Sequence[float]) -> Point:
    room = 0.05 * (max(values) - min(values)) or 1.0
    return min(values) - room, max(values) + room


def _draw_band(canvas: ImageDraw.ImageDraw, axes: Axes, points: Sequence[tuple[float, list[float]]]) -> None:
    if len(points) > 1:
        above = [axes.at(x, max(ys)) for x, ys in points]
        below = [axes.at(x, min(ys)) for x, ys in points]
        canvas.polygon(above + below[::-1], fill=BAND)


def _draw_grid(canvas: ImageDraw.ImageDraw, axes: Axes) -> None:
    for value in _ticks(axes.y):
        canvas.line([axes.at(axes.x[0], value), axes.at(axes.x[1], value)], fill=GRID, width=FINER)
        _text(canvas, LEFT - 8, axes.at(0, value)[1] / FINER, f"{value:g}", "rm")
    for value in _ticks(axes.x):
        canvas.line([axes.at(value, axes.y[0]), axes.at(value, axes.y[1])], fill=GRID, width=FINER)
        _text(canvas, axes.at(value, 0)[0] / FINER, SIZE[1] - BOTTOM + 14, f"{value:g}", "mm")


def _ticks(ends: Point) -> list[float]:
    """About five round values between both ends."""
    power = 10.0**-6
    while all((ends[1] - ends[0]) / (step * power) > 6 for step in STEPS):
        power *= 10
    step = power * next(step for step in STEPS if (ends[1] - ends[0]) / (step * power) <= 6)
    first = -int(-ends[0] // step)
    return [round(number * step, 9) for number in range(first, int(ends[1] // step) + 1)]


def _draw_curve(canvas: ImageDraw.ImageDraw, axes: Axes, points: Sequence[Point], colour: str, width: float) -> None:
    places = [axes.at(*point) for point in points]
    canvas.line(places, fill=colour, width=round(width * FINER), joint="curve")
    radius = (width / 2 + 2) * FINER
    for x, y in places:
        canvas.ellipse([x - radius, y - radius, x + radius, y + radius], fill=colour)


def _draw_label(canvas: ImageDraw.ImageDraw, number: int, method: str) -> None:
    x, y = SIZE[0] - RIGHT + 20, TOP + 20 + 26 * number
    width = round(WIDTHS[min(number, len(WIDTHS) - 1)] * FINER)
    canvas.line([FINER * x, FINER * y, FINER * (x + 24), FINER * y], fill=COLOURS.get(method, OTHER), width=width)
    _text(canvas, x + 32, y, method, "lm")


def _text(canvas: ImageDraw.ImageDraw, x: float, y: float, text: str, anchor: str = "la") -> None:
    canvas.text((FINER * x, FINER * y), text, fill=INK, anchor=anchor, font=ImageFont.load_default(14 * FINER))
