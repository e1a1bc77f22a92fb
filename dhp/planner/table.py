"""A plan as a person reads it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from dhp.planner.costs import PartCosts, Plan
from dhp.planner.planner import as_text

_HEADINGS = ("part", "kind", "recomputed", "layers", "held a layer", "recomputing a layer")


def plan_table(costs: Mapping[str, PartCosts], plan: Plan) -> list[str]:
    """Lines: how many layers of each kind recompute what, with the bytes and milliseconds of one of them."""
    rows = [_HEADINGS]
    for part, known in costs.items():
        for (kind, choice), count in Counter(zip(known.kinds, plan[part], strict=True)).items():
            cost = known.layers[kind][choice]
            rows.append((part, kind, choice, str(count), mebibytes(cost.held_bytes), f"{cost.replay_s * 1e3:.1f} ms"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
    return [*lines, *(f"{part}.recompute={as_text(plan[part])}" for part in costs)]


def mebibytes(count: float) -> str:
    """`12.3 MiB` of 2²⁰ bytes."""
    return f"{count / 2**20:.1f} MiB"
