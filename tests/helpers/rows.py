"""Rows of tables of layouts."""

from __future__ import annotations

from typing import Any

import pytest


def on_demand(*values: Any) -> Any:
    """A row for `-m grid`: tests/engine/pair_rows.py has each pair of its features, and always runs."""
    return pytest.param(*values, marks=pytest.mark.grid)
