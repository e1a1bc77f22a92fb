"""What runs have measured, kept in a file by all that it depends on, for later runs that are the same in that."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dhp.core.files import write_whole


def read_entry(path: Path, shape: Mapping[str, Any]) -> Any:
    """What a run of this shape has kept, or None. A file that is no such cache is ignored: measuring again costs a few
    steps, an old file must not cost a run."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))[_key(shape)]["costs"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_entries(path: Path) -> list[dict[str, Any]]:
    """All entries of a file: `shape`, and `costs` as they were kept. None of a file that is no such cache."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")).values()
        return [entry for entry in found if {"shape", "costs"} <= set(entry)]
    except (OSError, ValueError, AttributeError, TypeError):
        return []


def write_entry(path: Path, shape: Mapping[str, Any], costs: Any) -> None:
    """Add or replace this shape's entry; others stay. The file appears whole or not at all."""
    try:
        entries = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        entries = {}
    entries[_key(shape)] = {"shape": dict(shape), "costs": costs}
    write_whole(path, json.dumps(entries, indent=1) + "\n")


def _key(shape: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(shape, sort_keys=True).encode()).hexdigest()[:16]
