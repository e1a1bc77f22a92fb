"""A plan as a table for users."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from dhp.base.table import aligned
from dhp.planner.costs import Plan, StageCosts

_HEADINGS = ("stage", "kind", "recomputed", "layers", "held a layer", "recomputing a layer")


def plan_table(costs: Mapping[str, StageCosts], plan: Plan) -> list[str]:
    """Lines: how many layers of each kind recompute what, with the bytes and milliseconds of one of them."""
    rows = [_HEADINGS]
    for stage, known in costs.items():
        for (kind, choice), count in Counter(zip(known.kinds, plan[stage], strict=True)).items():
            cost = known.layers[kind][choice]
            rows.append((stage, kind, choice, str(count), mebibytes(cost.held_bytes), f"{cost.replay_s * 1e3:.1f} ms"))
    return aligned(rows, left=len(_HEADINGS))


def mebibytes(count: float) -> str:
    """`12.3 MiB` of 2²⁰ bytes."""
    return f"{count / 2**20:.1f} MiB"
