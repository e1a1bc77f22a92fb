"""Writes and reads what a part keeps, as values of a file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from dhp.plan.count.row_bytes import Inside, PartBytes, RowBytes


def written_bytes(kept: PartBytes) -> dict[str, Any]:
    """Values of a file."""
    of_kinds = ("held", "replay", "insides")
    by_choice = {what: [[*key, asdict(own)] for key, own in getattr(kept, what).items()] for what in of_kinds}
    rows = {what: asdict(getattr(kept, what)) for what in ("before", "after")}
    listed = {"more": [asdict(one) for one in kept.more], "ends": [asdict(one) for one in kept.ends]}
    return {"kinds": list(kept.kinds), **listed, **by_choice, **rows}


def read_bytes(values: Mapping[str, Any]) -> PartBytes:
    """What was written."""
    held, replay = (
        {(kind, choice): RowBytes(**own) for kind, choice, own in values[what]} for what in ("held", "replay")
    )
    more = tuple(RowBytes(**own) for own in values["more"])
    insides = {(kind, choice): _inside(own) for kind, choice, own in values["insides"]}
    before, after = (_inside(own) for own in values["ends"])
    kinds, outside = tuple(values["kinds"]), (RowBytes(**values["before"]), RowBytes(**values["after"]))
    return PartBytes(kinds, held, replay, more, *outside, insides, (before, after))


def _inside(values: Mapping[str, Any]) -> Inside:
    return Inside(**{name: tuple(RowBytes(**one) for one in own) for name, own in values.items()})
