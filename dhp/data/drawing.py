"""Small pictures of coloured shapes, digits and bars, drawn from a seeded random source."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from PIL import Image, ImageDraw

PALETTE = {
    "red": (215, 30, 35),
    "green": (30, 150, 60),
    "blue": (35, 70, 215),
    "yellow": (240, 210, 30),
    "purple": (140, 45, 165),
    "orange": (245, 135, 25),
    "black": (20, 20, 20),
}
COLOURS = tuple(PALETTE)
SHAPES = ("circle", "square", "triangle", "cross")

MIN_SIDE, MAX_SIDE = 56, 168  # pixels

# The seven strokes of a digit on a 1 × 2 grid, as (x0, y0, x1, y1):
#     ─0─
#    5   1
#     ─6─
#    4   2
#     ─3─
_STROKES = ((0, 0, 1, 0), (1, 0, 1, 1), (1, 1, 1, 2), (0, 2, 1, 2), (0, 1, 0, 2), (0, 0, 0, 1), (0, 1, 1, 1))
_DIGITS = ("012345", "12", "01643", "01623", "5612", "05623", "056234", "012", "0123456", "012356")


def shapes(random: Random, shape: str, colours: Sequence[str]) -> Image.Image:
    """One shape of each colour, side by side on a light background."""
    image, draw = _canvas(random, min_width=28 * len(colours))
    cell = image.width / len(colours)
    for column, colour in enumerate(colours):
        radius = min(cell, image.height) * random.uniform(0.3, 0.45)
        x = cell * column + random.uniform(radius, cell - radius)
        y = random.uniform(radius, image.height - radius)
        _shape(draw, shape, x, y, radius, PALETTE[colour])
    return image


def digit(random: Random, value: int, colour: str) -> Image.Image:
    """A digit (0..9) in seven strokes."""
    image, draw = _canvas(random)
    unit = min(image.width / 2, image.height / 3) * random.uniform(0.8, 1.0)
    left, top = (image.width - unit) / 2, (image.height - 2 * unit) / 2
    for stroke in _DIGITS[value]:
        x0, y0, x1, y1 = (unit * end for end in _STROKES[int(stroke)])
        ends = (left + x0, top + y0, left + x1, top + y1)
        draw.line(ends, fill=PALETTE[colour], width=max(4, round(unit / 5)))
    return image


def bars(random: Random, colours: Sequence[str], heights: Sequence[int]) -> Image.Image:
    """A bar chart. heights: tenths of the picture's height, one a colour."""
    image, draw = _canvas(random, min_width=24 * len(colours))
    cell = image.width / len(colours)
    for column, (colour, height) in enumerate(zip(colours, heights)):
        top = image.height * (1 - height / 10.5)
        draw.rectangle((cell * (column + 0.15), top, cell * (column + 0.85), image.height), fill=PALETTE[colour])
    return image


def _canvas(random: Random, min_width: int = MIN_SIDE) -> tuple[Image.Image, ImageDraw.ImageDraw]:
    width = random.randint(max(MIN_SIDE, min_width), MAX_SIDE)
    height = random.randint(MIN_SIDE, MAX_SIDE)
    image = Image.new("RGB", (width, height), tuple(random.randint(225, 255) for _ in range(3)))
    return image, ImageDraw.Draw(image)


def _shape(draw: ImageDraw.ImageDraw, shape: str, x: float, y: float, r: float, fill: tuple[int, int, int]) -> None:
    """Draw a shape centred on (x, y) that reaches r pixels to each side."""
    if shape == "circle":
        draw.ellipse((x - r, y - r, x + r, y + r), fill=fill)
    elif shape == "square":
        draw.rectangle((x - r, y - r, x + r, y + r), fill=fill)
    elif shape == "triangle":
        draw.polygon([(x, y - r), (x + r, y + r), (x - r, y + r)], fill=fill)
    else:
        draw.rectangle((x - r, y - r / 3, x + r, y + r / 3), fill=fill)
        draw.rectangle((x - r / 3, y - r, x + r / 3, y + r), fill=fill)
