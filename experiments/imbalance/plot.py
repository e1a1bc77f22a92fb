"""OmniBal's panels: a stage a place, a line for each replica at each of two moments."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.imbalance.spread import Row
from experiments.published.canvas import BOTTOM, GAP, SIDE, TOP, Canvas

QUANTITIES = {"forward_ms": "forward, ms", "activation_mib": "activations, MiB"}
COLOURS = {
    ("T-0", "DP-0"): "#00798c",
    ("T-0", "DP-1"): "#66a182",
    ("T-1", "DP-0"): "#d1495b",
    ("T-1", "DP-1"): "#edae49",
}
MARGIN = 24  # pixels of a panel that nothing is drawn in


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG of the rows of moments. Raises ValueError where there are none."""
    found = [row for row in rows if row.get("row") == "moment"]
    if not found:
        raise ValueError("no row is of a moment")
    ways = list(dict.fromkeys(row["way"] for row in found))
    canvas = Canvas(len(ways) * len(QUANTITIES))
    for at, (name, title) in enumerate(QUANTITIES.items()):
        most = max(value for row in found for value in row[name])
        for number, way in enumerate(ways):
            left = canvas.left(at * len(ways) + number)
            canvas.frame(left)
            canvas.text(left, TOP - 36, way)
            canvas.text(left, TOP - 18, f"{title} (most: {most:.0f})")
            for row in (row for row in found if row["way"] == way):
                _draw_line(canvas, left, row, [value / most for value in row[name]])
    for number, ((moment, replica), colour) in enumerate(COLOURS.items()):
        x = canvas.left(0) + number * (SIDE + GAP) / 3
        canvas.dot(x, TOP + SIDE + BOTTOM - 14, colour)
        canvas.text(x + 8, TOP + SIDE + BOTTOM - 21, f"{moment}, {replica}")
    canvas.save(path)


def _draw_line(canvas: Canvas, left: float, row: Row, shares: Sequence[float]) -> None:
    colour, wide = COLOURS[row["moment"], row["replica"]], (SIDE - 2 * MARGIN) / max(1, len(shares) - 1)
    points = [(left + MARGIN + wide * at, TOP + SIDE - (SIDE - MARGIN) * share) for at, share in enumerate(shares)]
    canvas.line([point for pair in zip(points, points[1:]) for point in pair], colour)
    for at, (x, y) in enumerate(points):
        canvas.dot(x, y, colour)
        canvas.text(x - 3, TOP + SIDE + 4, str(at + 1))
