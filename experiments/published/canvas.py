"""A picture of panels side by side, drawn larger and reduced, for smooth letters, with Pillow."""

import math
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

FINER = 3
SIDE, LEFT, TOP, GAP, BOTTOM = 270, 56, 64, 70, 40  # pixels of a panel and around it
DOT = 4
INK, GRID = "#202020", "#d8d8d8"


class Canvas:
    """For so many panels."""

    def __init__(self, panels: int):
        self._size = (LEFT + panels * (SIDE + GAP), TOP + SIDE + BOTTOM)
        self._image = Image.new("RGB", (FINER * self._size[0], FINER * self._size[1]), "white")
        self._draw = ImageDraw.Draw(self._image)

    def left(self, panel: int) -> float:
        return LEFT + panel * (SIDE + GAP)

    def frame(self, left: float) -> None:
        """Of a panel."""
        self._draw.rectangle([FINER * v for v in (left, TOP, left + SIDE, TOP + SIDE)], outline=GRID, width=FINER)

    def line(self, points: Sequence[tuple[float, float]], colour: str) -> None:
        self._draw.line([FINER * v for point in points for v in point], fill=colour, width=FINER)

    def dot(self, x: float, y: float, colour: str) -> None:
        self._draw.ellipse([FINER * v for v in (x - DOT, y - DOT, x + DOT, y + DOT)], fill=colour)

    def box(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        self._draw.rectangle([FINER * v for v in (x, y, x + width, y + height)], fill=colour)

    def text(self, x: float, y: float, text: str) -> None:
        self._draw.text((FINER * x, FINER * y), text, INK, ImageFont.load_default(FINER * 11))

    def save(self, path: Path) -> None:
        """As a PNG."""
        self._image.resize(self._size, Image.Resampling.LANCZOS).save(path)


def beside_panel(canvas: Canvas, left: float, title: str, points: Sequence[tuple[float, float, str]]) -> None:
    """A panel of predicted figures (up) beside real ones, on logarithmic axes. points: real, predicted, colour."""
    figures = [value for point in points for value in point[:2]]
    low, high = math.log(min(figures) / 1.15), math.log(max(figures) * 1.15)
    across = lambda value: SIDE * (math.log(value) - low) / (high - low)
    canvas.text(left, TOP - 20, title)
    canvas.frame(left)
    canvas.line([(left, TOP + SIDE), (left + SIDE, TOP)], GRID)
    powers = range(math.floor(low / math.log(10)), math.ceil(high / math.log(10)) + 1)
    for tick in (first * 10.0**power for power in powers for first in (1, 2, 5)):
        if low < math.log(tick) < high:
            canvas.text(left + across(tick) - 8, TOP + SIDE + 4, f"{tick:g}")
            canvas.text(left - 38, TOP + SIDE - across(tick) - 7, f"{tick:g}")
    for real, predicted, colour in points:
        canvas.dot(left + across(real), TOP + SIDE - across(predicted), colour)
