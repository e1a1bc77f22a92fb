"""Sweeps of ISF: which limits each row has, and that fewer passes leave more uneven packs."""

import numpy as np
import pytest

from dhp.data.balance.packs import Limits, Loads
from experiments.balance.__main__ import PASSES, settings, sweep_rows


def test_a_row_changes_one_setting_at_a_time() -> None:
    limits = Limits(9, 4096)
    assert [own.passes for _, own in settings("passes", limits)] == list(PASSES)
    assert all(own.full == (9, 3968) for _, own in settings("passes", limits))
    full = [own.full for _, own in settings("filters", limits)]
    assert full == [(9, 4096), (9, 4032), (9, 3968), (9, 3840), (8, 3968), (7, 3968)]
    assert all(own.passes == 10 and (own.vision, own.text) == (9, 4096) for _, own in settings("filters", limits))


def test_more_passes_are_more_even_and_rows_name_what_they_changed() -> None:
    rng = np.random.default_rng(0)
    loads = Loads(rng.integers(0, 6, 4000), rng.integers(100, 2000, 4000))
    rows = list(sweep_rows("passes", "drawn", loads, Limits(9, 4096), 4, 0))
    assert [row["passes"] for row in rows] == list(PASSES)
    assert rows[0]["packs"] > rows[-1]["packs"] and rows[0]["dist_vision"] > rows[-1]["dist_vision"]
    filters = list(sweep_rows("filters", "drawn", loads, Limits(9, 4096), 4, 0))
    of = {(row["full_vision"], row["full_text"]): row["packs"] for row in filters}
    assert of[9, 3968] == rows[-1]["packs"] == pytest.approx(of[9, 3840], rel=0.05)
