"""Held-out loss over samples seen, a curve for each method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean

from dhp.report.charts import Line, line_chart
from experiments.convergence.summary import Row, methods_of

TITLE = "held-out loss over samples seen, means over seeds"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG: for each method the mean over seeds at each checkpoint."""
    curves = {method: _curve(rows, method) for method in methods_of(rows)}
    lines = [Line(name, [x for x, _ in points], [y for _, y in points]) for name, points in curves.items()]
    drawn = line_chart(path.stem, TITLE, lines, "nats a token")
    drawn.write_png(path.parent)


def _curve(rows: Sequence[Row], method: str) -> list[tuple[int, float]]:
    """For each checkpoint in order: means of the samples seen and of the loss, over seeds."""
    by_seed: dict[int, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["step"]):
        if row["method"] == method:
            by_seed.setdefault(row["seed"], []).append(row)
    together = zip(*by_seed.values(), strict=False)  # a seed's epoch may have a checkpoint more than another's
    return [(round(mean(row["samples"] for row in at)), mean(row["heldout_loss"] for row in at)) for at in together]
