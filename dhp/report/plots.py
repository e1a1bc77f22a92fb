"""Draws histograms, tables of shares, and points."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dhp.report.charts import (
    BOTTOM,
    HEIGHT,
    LEFT,
    RIGHT,
    TOP,
    WIDTH,
    Box,
    Dot,
    Drawing,
    Label,
    Pixels,
    Polyline,
    Scale,
    Shape,
    draw_axes,
    name_series,
)

BINS = 60
CUT = 0.999  # quantile where an axis ends, so that one long sample does not press all others into a bin
CELL = (72, 44)  # of a table of shares, pixels
MAP_LEFT, MAP_BOTTOM = 96, 56  # pixels beside and below its cells
GREY, LIMIT = 6, 5  # colours of the palette
_LOW, _HIGH = (214, 96, 77), (90, 174, 97)  # of the shares 0 and 1

Series = Mapping[str, np.ndarray]  # numbers >= 0 by name, two at most


def histograms(name: str, panels: Mapping[str, Series], across: str, up: str) -> Drawing:
    """One panel below another. panels: by title; of two series the first is filled, the second an outline. across, up:
    what the axes say."""
    shapes: list[Shape] = []
    for number, (title, series) in enumerate(panels.items()):
        shapes += _panel(title, series, across, up, number * HEIGHT)
    return Drawing(name, ", ".join(panels), WIDTH, HEIGHT * len(panels), shapes)


def _panel(title: str, series: Series, across: str, up: str, top: int) -> list[Shape]:
    most = max(1.0, *(float(np.quantile(numbers, CUT)) for numbers in series.values()))
    bins = {name: np.histogram(np.minimum(numbers, most), BINS, (0.0, most)) for name, numbers in series.items()}
    highest = max(1.0, *(float(counts.max()) for counts, _ in bins.values()))
    x = Scale(0.0, most, LEFT, WIDTH - RIGHT)
    y = Scale(0.0, highest, top + HEIGHT - BOTTOM, top + TOP + 16)
    if any(numbers.max() > most for numbers in series.values()):
        across += f" (the last bin holds all from {most:.0f} on)"
    shapes = [*draw_axes(x, y, across, up, whole=True), Label(LEFT, top + 14, title)]
    for colour, (counts, edges) in enumerate(bins.values()):
        shapes += _bars(counts, edges, x, y) if colour == 0 else [_outline(counts, edges, x, y)]
    captions = [f"{name}: mean {own.mean():.0f}, longest {own.max():.0f}" for name, own in series.items()]
    return [*shapes, *name_series(captions, top + 20)]


def _bars(counts: np.ndarray, edges: np.ndarray, x: Scale, y: Scale) -> list[Shape]:
    return [
        Box(x(begin), y(count), x(end) - x(begin) - 0.5, y(0.0) - y(count), 0)
        for count, begin, end in zip(counts.tolist(), edges, edges[1:])
        if count
    ]


def _outline(counts: np.ndarray, edges: np.ndarray, x: Scale, y: Scale) -> Polyline:
    last = int(np.flatnonzero(counts)[-1])
    line = [(x(0.0), y(0.0))]
    for count, begin, end in zip(counts[: last + 1].tolist(), edges, edges[1:]):
        line += [(x(begin), y(count)), (x(end), y(count))]
    return Polyline([*line, (x(edges[last + 1]), y(0.0))], 1)


def share_table(
    name: str, title: str, shares: Sequence[Sequence[float]], columns: Sequence[str], rows: Sequence[str], axes: str
) -> Drawing:
    """shares: of each row, one for each column, 0 to 1. axes: what columns and rows are."""
    right, bottom = MAP_LEFT + CELL[0] * len(columns), TOP + CELL[1] * len(rows)
    values = np.array([[_colour(share) for share in of_row] for of_row in shares], dtype=np.uint8)
    shapes: list[Shape] = [Label(RIGHT, 18, title), Pixels(MAP_LEFT, TOP, right - MAP_LEFT, bottom - TOP, values)]
    for r, (row, of_row) in enumerate(zip(rows, shares, strict=True)):
        y = TOP + CELL[1] * (r + 0.5) + 4
        shapes.append(Label(MAP_LEFT - 8, y, row, "end"))
        shapes += [Label(MAP_LEFT + CELL[0] * (c + 0.5), y, f"{share:.0%}", "middle") for c, share in enumerate(of_row)]
    shapes += [Label(MAP_LEFT + CELL[0] * (c + 0.5), bottom + 18, one, "middle") for c, one in enumerate(columns)]
    shapes.append(Label(MAP_LEFT, bottom + 42, axes))
    return Drawing(name, title, max(right, 7 * len(title)) + 2 * RIGHT, bottom + MAP_BOTTOM, shapes)


def _colour(share: float) -> tuple[int, ...]:
    far, end = abs(2 * share - 1), _HIGH if share > 0.5 else _LOW
    return tuple(round(255 + (value - 255) * far) for value in end)


@dataclass(frozen=True)
class Point:
    """x, y: 0 or more. name: beside it; "": none. filled: false for one that is doubtful."""

    x: float
    y: float
    name: str = ""
    filled: bool = True


def points_on_axes(
    name: str, title: str, points: Sequence[Point], across: str, up: str, limit: tuple[float, str] | None
) -> Drawing:
    """across, up: what the axes say. limit: a value across with its name, where a line is drawn."""
    height = 2 * HEIGHT
    most = max([point.x for point in points] + ([limit[0]] if limit else []) + [1e-9]) * 1.1
    x = Scale(0.0, most, LEFT, WIDTH - RIGHT)
    y = Scale(0.0, max([point.y for point in points] + [1e-9]) * 1.1, height - BOTTOM, TOP)
    shapes = [*draw_axes(x, y, across, up), Label(LEFT, 18, title)]
    if limit is not None:
        shapes.append(Polyline(((x(limit[0]), y.first), (x(limit[0]), y.last)), LIMIT))
        shapes.append(Label(x(limit[0]) - 6, y.last + 12, limit[1], "end"))
    for point in points:
        shapes.append(Dot(x(point.x), y(point.y), 0 if point.filled else GREY))
        shapes.append(Label(x(point.x) + 6, y(point.y) + 4, point.name))
    return Drawing(name, title, WIDTH, height, shapes)
