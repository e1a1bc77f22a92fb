"""The largest row, and the time of an epoch's steps, of packs that are counted by hand."""

import numpy as np
import pytest

from dhp.data.balance.packs import Loads, from_groups
from experiments.balance.sets import row_columns

TOKENS = 36864  # whose attention costs as much as all the rest


@pytest.mark.parametrize("padded, longest, time", [(False, TOKENS + 100, 1.0), (True, 2 * TOKENS, 2.0)])
def test_padding_costs_rows_as_long_as_the_longest(padded: bool, longest: int, time: float) -> None:
    """One replica, one pack of a long sample and a very short one."""
    loads = Loads(np.array([3, 4]), np.array([TOKENS, 100]))
    found = row_columns(from_groups(np.zeros(2, dtype=np.int64)), loads, 1, padded)
    assert (found["longest_vision"], found["longest_text"]) == (7, longest)
    assert found["time_to_even"] == pytest.approx(time, abs=0.01)


def test_a_step_lasts_as_long_as_its_fullest_replica() -> None:
    """Five equal rows on four replicas are two steps; two of unequal ones wait for the larger."""
    five = row_columns(from_groups(np.arange(5)), Loads(np.ones(5), np.full(5, 64)), 4, False)
    assert five["time_to_even"] == pytest.approx(2 / (5 / 4))
    two = row_columns(from_groups(np.arange(2)), Loads(np.ones(2), np.array([TOKENS, TOKENS // 2])), 2, False)
    assert two["time_to_even"] == pytest.approx(2.0 / ((2.0 + 0.75) / 2), abs=1e-4)
