"""Published tables and profiles of implementations: JSON files in data/, each with its source."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

FOLDER = Path(__file__).parent / "data"
FIT, HELD_OUT, UNEXPLAINED = "fit", "held_out", "unexplained"
ROLES = (FIT, HELD_OUT, UNEXPLAINED)
Row = dict[str, Any]


@cache
def read_table(name: str) -> dict[str, Any]:
    """data/NAME.json."""
    found: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return found


def compared(table: Row, row: Row, predicted: float | None, **more: Any) -> Row:
    """A published row beside what the simulator has. error: by the published figure; None: out of memory, either."""
    published = row["published"]
    error = None if published is None or predicted is None else predicted / published - 1
    return {
        "source": table["source"], "group": row["group"], "row": row["row"],
        "published": "OOM" if published is None else published,
        "predicted": "OOM" if predicted is None else float(f"{predicted:.5g}"),
        "error": None if error is None else round(error, 4) + 0.0, "role": row["role"], "unit": table["unit"], **more,
    }  # fmt: skip


def errors(rows: Sequence[Row], group: str | None = None) -> list[float]:
    """Absolute errors of what is held out, of one group or of all."""
    own = [row for row in rows if row["role"] == HELD_OUT and group in (None, row["group"])]
    return [abs(row["error"]) for row in own if row["error"] is not None]


def score(table: Row, rows: Sequence[Row], group: str, goal: Row | None, **more: Any) -> Row:
    """The errors of a group's rows that are held out, beside the goal where there is one, with what was inferred."""
    found = errors(rows, group)
    reached = {"median": round(median(found), 4), "max": round(max(found), 4)}
    met = None if goal is None else all(reached[key] <= goal[key] for key in reached)
    counts = {"fitted": sum(row["role"] == FIT and row["group"] == group for row in rows), "held_out": len(found)}
    line = {"source": table["source"], "score": group, **counts, **reached, "goal": goal, "met": met}
    return {**line, **more, "inferred": table["inferred"]}
