"""What modules of a user's may register, by the key of a configuration that names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TABLES: dict[str, Mapping[str, Any]] = {}


def takes(key: str, table: Mapping[str, Any]) -> None:
    """A table takes entries of modules. key: of the configuration, whose value names an entry."""
    _TABLES[key] = table


def registered() -> list[Any]:
    """All entries of the tables whose modules are imported by now."""
    return [entry for table in _TABLES.values() for entry in table.values()]


def names(key: str) -> tuple[str, ...]:
    """The names of a table's entries; none where its module is not imported, since then nobody added any."""
    return tuple(_TABLES.get(key, ()))
