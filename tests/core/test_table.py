"""Rows as aligned lines."""

from __future__ import annotations

import pytest

from dhp.core.text import aligned


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    rows = [("stage", "kind", "bytes"), ("vision", "", "7"), ("text", "causal", "12,345")]
    assert aligned(rows, left=2) == ["stage   kind     bytes", "vision               7", "text    causal  12,345"]
    assert aligned(rows, left=3) == ["stage   kind    bytes", "vision          7", "text    causal  12,345"]


def test_a_row_with_a_cell_too_many_is_a_mistake() -> None:
    with pytest.raises(ValueError):
        aligned([("a", "b"), ("a", "b", "c")], left=1)
