"""Points on two axes as a picture, drawn without a plotting library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from dhp.observe.plots import COLOURS, FAINT, INK, Font, ticks

WIDTH, HEIGHT = 900, 560  # pixels
LEFT, RIGHT, TOP, BOTTOM = 90, 40, 64, 66
_DOT = 6  # radius
_OPEN = (160, 160, 160)


@dataclass(frozen=True)
class Point:
    """x, y: 0 or more. name: beside it; "": none. filled: false for one that is doubtful."""

    x: float
    y: float
    name: str = ""
    filled: bool = True


@dataclass(frozen=True)
class _Plane:
    across: float
    up: float

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Pixels of a point."""
        return (
            LEFT + (WIDTH - LEFT - RIGHT) * x / self.across,
            HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * y / self.up,
        )


def draw_points(
    points: Sequence[Point], title: str, across: str, up: str, limit: tuple[float, str] | None, path: Path
) -> None:
    """Write a PNG. across, up: what the axes say. limit: a value across with its name, where a line is drawn."""
    most_x = max([point.x for point in points] + ([limit[0]] if limit else []) + [1e-9]) * 1.1
    plane = _Plane(most_x, max([point.y for point in points] + [1e-9]) * 1.1)
    font = ImageFont.load_default(14)
    image = Image.new("RGB", (WIDTH, HEIGHT), "white")
    draw = ImageDraw.Draw(image)
    draw.text((LEFT, TOP / 2), title, fill=INK, font=font, anchor="lm")
    _draw_axes(draw, font, plane, across, up)
    if limit is not None:
        (x, floor), (_, top) = plane.at(limit[0], 0), plane.at(limit[0], plane.up)
        draw.line((x, floor, x, top), fill=COLOURS[1], width=2)
        draw.text((x - 6, top + 4), limit[1], fill=COLOURS[1], font=font, anchor="ra")
    for point in points:
        x, y = plane.at(point.x, point.y)
        box = (x - _DOT, y - _DOT, x + _DOT, y + _DOT)
        draw.ellipse(box, fill=COLOURS[0] if point.filled else _OPEN, outline=INK)
        draw.text((x + _DOT + 3, y), point.name, fill=INK, font=font, anchor="lm")
    image.save(path, format="PNG")


def _draw_axes(draw: ImageDraw.ImageDraw, font: Font, plane: _Plane, across: str, up: str) -> None:
    left, floor = plane.at(0, 0)
    for value in _marks(plane.up):
        _, y = plane.at(0, value)
        draw.line((left, y, WIDTH - RIGHT, y), fill=FAINT)
        draw.text((left - 8, y), f"{value:g}", fill=INK, font=font, anchor="rm")
    for value in _marks(plane.across):
        x, _ = plane.at(value, 0)
        draw.line((x, floor, x, floor + 5), fill=INK)
        draw.text((x, floor + 8), f"{value:g}", fill=INK, font=font, anchor="ma")
    draw.line((left, floor, WIDTH - RIGHT, floor), fill=INK)
    draw.line((left, floor, left, TOP), fill=INK)
    draw.text(((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14), across, fill=INK, font=font, anchor="ms")
    draw.text((12, TOP - 10), up, fill=INK, font=font, anchor="lm")


def _marks(most: float) -> list[float]:
    """Round numbers up to `most`, which may be far below 1."""
    scale = 1.0
    while most * scale < 8:
        scale *= 10
    return [value / scale for value in ticks(most * scale)]
