"""Rows of tables of layouts."""

from collections.abc import Iterable
from typing import Any

import pytest


def on_demand(*values: Any) -> Any:
    """A row for `-m grid`: tests/engine/pair_rows.py has each pair of its features."""
    return pytest.param(*values, marks=pytest.mark.grid)


def slow(*values: Any) -> Any:
    """A row for `-m slow`: `make test` has others of its table, with what is particular to this one."""
    return pytest.param(*values, marks=pytest.mark.slow)


def slow_but(rows: Iterable[Any], *quick: Any) -> list[Any]:
    """The rows of a table, of which `make test` has the quick ones alone. Those with a mark already keep it."""
    table = list(rows)
    missing = [row for row in quick if row not in table or hasattr(row, "marks")]
    assert quick and not missing, f"not in the table, or marked there, so that `make test` has none of it: {missing}"
    return [row if row in quick or hasattr(row, "marks") else slow(*_values(row)) for row in table]


def _values(row: Any) -> tuple[Any, ...]:
    return row if type(row) is tuple else (row,)
