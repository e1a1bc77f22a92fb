"""Scores of predictions: errors, the order of layouts, and what choosing by a prediction costs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from statistics import median
from typing import Any


def errors_of(rows: Sequence[dict[str, Any]], key: str) -> dict[str, Any]:
    """Of the rows that have one: median and largest of the absolute error, and the least signed one."""
    known = [row[key] for row in rows if row.get(key) is not None]
    return {
        "rows": len(known),
        "median": round(median(map(abs, known)), 5),
        "max": round(max(map(abs, known)), 5),
        "least": round(min(known), 5),
    }


def kendall(predicted: Sequence[float], measured: Sequence[float], alike: float = 0.0) -> float:
    """Kendall's τ: pairs in the same order less those in the other, by all pairs. alike: pairs whose measured values
    differ by less than this share are left out."""
    pairs = [
        (predicted[a] - predicted[b]) * (measured[a] - measured[b])
        for a, b in combinations(range(len(measured)), 2)
        if abs(measured[a] - measured[b]) > alike * min(measured[a], measured[b])
    ]
    return sum((one > 0) - (one < 0) for one in pairs) / len(pairs) if pairs else 1.0


def regret(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """By how much the layout that is predicted to be the fastest takes longer than the fastest one."""
    chosen = min(range(len(predicted)), key=predicted.__getitem__)
    return measured[chosen] / min(measured) - 1
