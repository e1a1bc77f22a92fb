"""Histograms and tables of shares as pictures, drawn without a plotting library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

WIDTH, HEIGHT = 900, 340  # of one panel, pixels
LEFT, RIGHT, TOP, BOTTOM = 90, 24, 64, 66
BINS = 60
INK, FAINT = (40, 40, 40), (225, 225, 225)
COLOURS = ((66, 113, 174), (214, 96, 40))  # of the first series, which is filled, and of the second, an outline
CUT = 0.999  # quantile where the axis ends, so that one long sample does not press all others into a bin

Colour = tuple[int, int, int]
Font = ImageFont.ImageFont | ImageFont.FreeTypeFont
Series = Mapping[str, np.ndarray]  # numbers >= 0 by name, two at most


@dataclass(frozen=True)
class _Axes:
    """Coordinates of a panel. most: the largest across, and so many samples up."""

    top: int  # pixels
    most: float
    highest: float

    @property
    def floor(self) -> int:
        return self.top + HEIGHT - BOTTOM

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / self.most

    def y(self, count: float) -> float:
        return self.floor - (HEIGHT - TOP - BOTTOM) * count / self.highest


def draw_histograms(panels: Mapping[str, Series], across: str, up: str, path: Path) -> None:
    """One panel below another, PNG. panels: by title. across, up: what the two axes say."""
    image = Image.new("RGB", (WIDTH, HEIGHT * len(panels)), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(14)
    for number, (title, series) in enumerate(panels.items()):
        _draw(draw, font, title, series, number * HEIGHT)
        longer = max(float(numbers.max()) for numbers in series.values()) > _most(series)
        cut = f" (the last bin holds all from {_most(series):.0f} on)" if longer else ""
        _draw_names(image, font, across + cut, up, number * HEIGHT)
    image.save(path, format="PNG")


def _draw_names(image: Image.Image, font: Font, across: str, up: str, top: int) -> None:
    """Axis labels of the panel that begins at `top`; the upright one is turned."""
    draw = ImageDraw.Draw(image)
    draw.text(((LEFT + WIDTH - RIGHT) / 2, top + HEIGHT - 12), across, fill=INK, font=font, anchor="ms")
    left, upper, right, lower = font.getbbox(up)
    label = Image.new("RGB", (math.ceil(right - left) + 2, math.ceil(lower - upper) + 4), "white")
    ImageDraw.Draw(label).text((1 - left, 2 - upper), up, fill=INK, font=font)
    turned = label.rotate(90, expand=True)
    image.paste(turned, (12, top + TOP + (HEIGHT - TOP - BOTTOM - turned.height) // 2))


def ticks(most: float, wanted: int = 8) -> list[float]:
    """Round numbers from 0 to `most`, about so many: steps of 1, 2 or 5 times a power of ten, and whole."""
    rough = most / wanted
    power = 10.0 ** math.floor(math.log10(rough)) if rough > 0 else 1.0
    step = max(1.0, next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough))
    return [step * number for number in range(int(most / step + 1e-9) + 1)]


def _most(series: Series) -> float:
    return max(1.0, *(float(np.quantile(numbers, CUT)) for numbers in series.values()))


def _draw(draw: ImageDraw.ImageDraw, font: Font, title: str, series: Series, top: int) -> None:
    most = _most(series)
    bins = [np.histogram(np.minimum(numbers, most), BINS, (0.0, most)) for numbers in series.values()]
    axes = _Axes(top, most, max(1.0, *(float(counts.max()) for counts, _ in bins)))
    draw.text((LEFT, top + 8), title, fill=INK, font=font)
    _draw_grid(draw, font, axes)
    at = LEFT
    for number, ((name, numbers), (counts, edges)) in enumerate(zip(series.items(), bins)):
        colour = COLOURS[number]
        (_draw_bars if number == 0 else _draw_outline)(draw, axes, counts, edges, colour)
        draw.rectangle((at, top + 38, at + 12, top + 50), fill=colour)
        caption = f"{name}: mean {numbers.mean():.0f}, longest {numbers.max():.0f}"
        draw.text((at + 18, top + 36), caption, fill=INK, font=font)
        at += 18 + int(font.getlength(caption)) + 28


def _draw_grid(draw: ImageDraw.ImageDraw, font: Font, axes: _Axes) -> None:
    for count in ticks(axes.highest, 5):
        draw.line((LEFT, axes.y(count), WIDTH - RIGHT, axes.y(count)), fill=FAINT)
        draw.text((LEFT - 8, axes.y(count)), f"{count:.0f}", fill=INK, font=font, anchor="rm")
    for value in ticks(axes.most):
        draw.line((axes.x(value), axes.floor, axes.x(value), axes.floor + 5), fill=INK)
        draw.text((axes.x(value), axes.floor + 8), f"{value:.0f}", fill=INK, font=font, anchor="ma")
    draw.line((LEFT, axes.floor, WIDTH - RIGHT, axes.floor), fill=INK)
    draw.line((LEFT, axes.y(axes.highest), LEFT, axes.floor), fill=INK)


def _draw_bars(draw: ImageDraw.ImageDraw, axes: _Axes, counts: np.ndarray, edges: np.ndarray, colour: Colour) -> None:
    for count, begin, end in zip(counts, edges[:-1], edges[1:]):
        if count:
            draw.rectangle((axes.x(begin), axes.y(count), axes.x(end) - 1, axes.floor - 1), fill=colour)


def _draw_outline(
    draw: ImageDraw.ImageDraw, axes: _Axes, counts: np.ndarray, edges: np.ndarray, colour: Colour
) -> None:
    last = int(np.flatnonzero(counts)[-1])
    line: list[tuple[float, float]] = [(LEFT, axes.floor)]
    for count, begin, end in zip(counts[: last + 1], edges, edges[1:]):
        line += [(axes.x(begin), axes.y(count)), (axes.x(end), axes.y(count))]
    draw.line([*line, (axes.x(edges[last + 1]), axes.floor)], fill=colour, width=2)


MAP_CELL, MAP_LEFT, MAP_TOP, MAP_BOTTOM, MAP_RIGHT = (72, 44), 96, 48, 64, 24  # pixels
MAP_INK = (40, 40, 40)
_COLD, _WARM = (214, 96, 77), (90, 174, 97)  # of the shares 0 and 1


def draw_heat_map(
    shares: Sequence[Sequence[float]],
    columns: Sequence[str],
    rows: Sequence[str],
    title: str,
    across: str,
    down: str,
    path: Path,
) -> None:
    """Write a PNG. shares: of each row, one for each column, 0 to 1. across, down: what the two axes say."""
    width, height = MAP_LEFT + MAP_CELL[0] * len(columns) + MAP_RIGHT, MAP_TOP + MAP_CELL[1] * len(rows) + MAP_BOTTOM
    font = ImageFont.load_default(14)
    image = Image.new("RGB", (max(width, round(font.getlength(title)) + 2 * MAP_RIGHT), height), "white")
    draw = ImageDraw.Draw(image)
    draw.text((MAP_RIGHT, MAP_TOP / 2), title, fill=MAP_INK, font=font, anchor="lm")
    for r, (name, values) in enumerate(zip(rows, shares, strict=True)):
        y = MAP_TOP + MAP_CELL[1] * r
        draw.text((MAP_LEFT - 8, y + MAP_CELL[1] / 2), name, fill=MAP_INK, font=font, anchor="rm")
        for c, share in enumerate(values):
            x = MAP_LEFT + MAP_CELL[0] * c
            draw.rectangle((x + 1, y + 1, x + MAP_CELL[0] - 1, y + MAP_CELL[1] - 1), fill=_colour(share))
            draw.text((x + MAP_CELL[0] / 2, y + MAP_CELL[1] / 2), f"{share:.0%}", fill=MAP_INK, font=font, anchor="mm")
    floor = MAP_TOP + MAP_CELL[1] * len(rows)
    for c, name in enumerate(columns):
        draw.text((MAP_LEFT + MAP_CELL[0] * (c + 0.5), floor + 14), name, fill=MAP_INK, font=font, anchor="mm")
    draw.text((MAP_LEFT, floor + 42), across, fill=MAP_INK, font=font, anchor="lm")
    draw.text((8, floor + 14), down, fill=MAP_INK, font=font, anchor="lm")
    image.save(path, format="PNG")


def _colour(share: float) -> tuple[int, ...]:
    far = abs(2 * share - 1)
    end = _WARM if share > 0.5 else _COLD
    return tuple(round(255 + (value - 255) * far) for value in end)
