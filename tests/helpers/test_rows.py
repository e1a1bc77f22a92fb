"""Which rows of a table are slow."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.rows import on_demand, slow, slow_but


def marks(rows: list[Any]) -> list[list[str]]:
    return [[mark.name for mark in getattr(row, "marks", ())] for row in rows]


def test_all_but_the_quick_ones() -> None:
    rows = slow_but([("a", 1), ("b", 2), on_demand("c", 3)], ("b", 2))
    assert marks(rows) == [["slow"], [], ["grid"]]
    assert [getattr(row, "values", row) for row in rows] == [("a", 1), ("b", 2), ("c", 3)]
    assert slow_but("abc", "b") == [slow("a"), "b", slow("c")]


@pytest.mark.parametrize("quick", [(), ("d",), (on_demand("c"),)], ids=["none", "not there", "marked"])
def test_a_table_without_a_quick_row_is_an_error(quick: tuple[Any, ...]) -> None:
    with pytest.raises(AssertionError, match="`make test` has none of it"):
        slow_but(["a", "b", on_demand("c")], *quick)
