"""A panel of patches a second by a picture's patches: the best published, and what plans and others reach."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from experiments.published.canvas import GRID, INK, SIDE, TOP, Canvas
from experiments.published.tables import PLANNED, Row

Curve = Mapping[int, float]  # patches a second by patches
COLOURS = {
    "best published": INK,
    "published degrees, by dhp, 16 B": "#8f8f8f",
    "planned, 16 B a parameter": "#00798c",
    "planned, 10 B a parameter": "#d1495b",
}
LOW, HIGH = 0.9, 1.15  # room around what is drawn
OF_PLANS = (("published degrees, all recomputed", 16), ("planned", 16), ("planned", 10))


def curves(rows: Sequence[Row]) -> dict[str, Curve]:
    """By their names in `COLOURS`."""
    plans = [row for row in rows if row["role"] == PLANNED and "search" in row]
    names = iter(COLOURS)
    found: dict[str, Curve] = {next(names): {row["patches"]: row["published"] for row in plans}}
    for name, (searched, state_bytes) in zip(names, OF_PLANS, strict=True):
        own = [row for row in plans if (row["search"], row["state_bytes"]) == (searched, state_bytes)]
        found[name] = {row["patches"]: row["predicted"] for row in own if row["predicted"] is not None}
    return found


def draw_lengths(canvas: Canvas, left: float, found: Mapping[str, Curve]) -> None:
    """Lines with a dot a length, on logarithmic axes."""
    across = _scale([patches for curve in found.values() for patches in curve])
    up = _scale([speed for curve in found.values() for speed in curve.values()])
    canvas.text(left, TOP - 20, "Qwen2.5-VL-32B, 8 H100: patches a second by patches")
    canvas.frame(left)
    for patches in next(iter(found.values())):
        canvas.text(left + across(patches) - 8, TOP + SIDE + 4, f"{patches // 1024}k")
    for speed in (5_000, 10_000, 20_000, 40_000):
        canvas.line([(left, TOP + SIDE - up(speed)), (left + SIDE, TOP + SIDE - up(speed))], GRID)
        canvas.text(left - 38, TOP + SIDE - up(speed) - 7, f"{speed // 1000}k")
    for at, (name, curve) in enumerate(found.items()):
        points = [(left + across(patches), TOP + SIDE - up(curve[patches])) for patches in sorted(curve)]
        canvas.line(points, COLOURS[name])
        for point in points:
            canvas.dot(*point, COLOURS[name])
        y = TOP + SIDE - 66 + 15 * at
        canvas.dot(left + 92, y + 7, COLOURS[name])
        canvas.text(left + 100, y, name)


def _scale(values: Sequence[float]) -> Callable[[float], float]:
    low, high = math.log(LOW * min(values)), math.log(HIGH * max(values))
    return lambda value: SIDE * (math.log(value) - low) / (high - low)
