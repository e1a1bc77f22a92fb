"""ISF by its own settings, as OmniBal sweeps them: passes (figure 4) and from what on a pack is full (table 6)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from dhp.data.balance.methods import BALANCE_METHODS as METHODS
from dhp.data.balance.metrics import measure_balance
from dhp.data.balance.packs import Limits, Loads

SWEEPS = ("passes", "filters")
PASSES = (1, 2, 3, 5, 10)
LESS_TEXT, LESS_VISION = (0, 64, 128, 256), (0, 1, 2)  # than a pack may hold: then it is full


def settings(sweep: str, limits: Limits) -> Iterator[tuple[dict[str, int], Limits]]:
    """What each row changes, and its limits. As published a pack is full at all of vision, or 128 tokens below text."""
    if sweep == "passes":
        yield from (({"passes": passes}, replace(limits, passes=passes)) for passes in PASSES)
        return
    less = [*((0, text) for text in LESS_TEXT), *((vision, 128) for vision in LESS_VISION[1:])]
    for vision, text in less:
        full = {"full_vision": limits.vision - vision, "full_text": limits.text - text}
        yield full, replace(limits, **full)


def sweep_rows(sweep: str, source: str, loads: Loads, limits: Limits, dp: int, seed: int) -> Iterator[dict[str, Any]]:
    """A row for each setting, at so many replicas."""
    for changed, own in settings(sweep, limits):
        packs = METHODS["isf"](loads, own, dp, seed)
        found = measure_balance(packs, loads, dp, padded=False, dispatched=False)
        dist = {"dist_vision": round(found.dist_vision, 5), "dist_text": round(found.dist_text, 5)}
        yield {"sweep": sweep, "source": source, "dp": dp, **changed, **dist, "packs": len(packs)}
