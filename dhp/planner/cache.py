"""Caches measured costs for later runs of the same shape: one JSON file, an entry a shape."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dhp.base.files import write_whole
from dhp.planner.costs import StageCosts

FILE = "recompute.json"


def read_costs(folder: Path, shape: Mapping[str, Any]) -> dict[str, StageCosts] | None:
    """Costs by part that a run of this shape cached in `folder`, or None. A file that is no such cache is ignored."""
    try:
        entry = json.loads((folder / FILE).read_text(encoding="utf-8"))[_key(shape)]
        return {part: StageCosts.from_json(costs) for part, costs in entry["costs"].items()}
    except (OSError, ValueError, KeyError, TypeError):
        return None  # measuring again costs a few steps, an old file must not cost a run


def write_costs(folder: Path, shape: Mapping[str, Any], costs: Mapping[str, StageCosts]) -> None:
    """Add or replace this shape's entry; others stay. The file appears whole or not at all."""
    path = folder / FILE
    try:
        entries = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        entries = {}
    entries[_key(shape)] = {"shape": dict(shape), "costs": {part: c.to_json() for part, c in costs.items()}}
    write_whole(path, json.dumps(entries, indent=1) + "\n")


def _key(shape: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:16]
