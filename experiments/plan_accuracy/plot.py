"""Predicted figures beside measured ones, a panel a kind, both axes logarithmic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from experiments.published.canvas import TOP, Canvas, beside_panel

COLOURS = ("#00798c", "#d1495b", "#edae49", "#66a182", "#2e4057")
Points = Mapping[str, Sequence[tuple[float, float]]]  # by name, measured and predicted


def panels_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Points]:
    """By title."""
    memory = [row for row in rows if row["mode"] == "memory" and "case" in row]
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for count in ("saved", "live"):
        for row in memory:
            if row[f"{count}_measured"]:
                part = str(row["stage"]).partition(".")[0]
                pair = (row[f"{count}_measured"] / 1e6, row[f"{count}_predicted"] / 1e6)
                found.setdefault(f"{count} bytes, MB", {}).setdefault(part, []).append(pair)
    for row in rows:
        if "measured_s" in row:
            pair = (row["measured_s"], row["predicted_s"])
            found.setdefault("seconds a step", {}).setdefault(row["group"], []).append(pair)
    return {title: dict(own) for title, own in found.items()}


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a PNG."""
    panels = panels_of(rows)
    canvas = Canvas(max(1, len(panels)))
    canvas.text(canvas.left(0), 10, "predicted (up) beside measured (across); the line: equal")
    for at, (title, own) in enumerate(panels.items()):
        left, colours = canvas.left(at), dict(zip(own, cycle(COLOURS)))
        beside_panel(canvas, left, title, [(*pair, colours[name]) for name, pairs in own.items() for pair in pairs])
        for number, (name, colour) in enumerate(colours.items()):
            canvas.dot(left + 12, TOP + 13 + 15 * number, colour)
            canvas.text(left + 20, TOP + 6 + 15 * number, name)
    canvas.save(path)
