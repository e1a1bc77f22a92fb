"""`python -m experiments.imbalance [--ways WAY …] [--steps 6] [--plot FILE] [--read FILE]`: how uneven are stages?"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.imbalance.spread import WAYS, Row, published_rows
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


STEPS = 6


def measured_rows(ways: Sequence[str], steps: int) -> Iterator[dict[str, Any]]:
    """Of each way, one after another, then what was published."""
    from experiments.imbalance.measured import make_work, measure  # not for a plot of what was read

    with tempfile.TemporaryDirectory(prefix="dhp-imbalance-") as folder:
        work = make_work(Path(folder), steps)
        for way in ways:
            yield from measure(way, steps, work)
    yield from published_rows()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a JSON line for each row."""
    parser = argparse.ArgumentParser(prog="python -m experiments.imbalance", description=__doc__)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=" | ".join(WAYS))
    parser.add_argument("--steps", type=int, default=STEPS, help="of 32 samples; in the first nothing is timed")
    parser.add_argument("--plot", type=Path, help="a PNG file to write")
    parser.add_argument("--read", type=Path, help="a file of rows to draw; nothing is trained")
    given = parser.parse_args(arguments)
    if given.steps < 2:
        parser.error(f"--steps {given.steps}: nothing is timed in the first step; take 2 or more")
    if given.read is not None:
        rows = [json.loads(line) for line in given.read.read_text(encoding="utf-8").splitlines()]
    else:
        chosen = "" if given.ways == list(WAYS) else " --ways " + " ".join(f"'{way}'" for way in given.ways)
        command = {"command": f"python -m experiments.imbalance{chosen} --steps {given.steps}"}
        rows = []
        for row in measured_rows(given.ways, given.steps):
            rows.append(row | command)
            print(json.dumps(rows[-1], ensure_ascii=False), flush=True)
    if given.plot is not None:
        draw(rows, given.plot)


if __name__ == "__main__":
    main()
