"""The lower bound on packs, as it is written into tables of results."""

import json

import numpy as np
import pytest

from dhp.data.balance.packs import Limits, Loads
from experiments.balance.sets import least_packs


@pytest.mark.parametrize(
    ("text", "packs"),
    [
        ([4, 4, 2], 1),  # they fill one
        ([6, 6, 6], 3),  # each above half: no two share a pack
        ([7, 7, 4, 4], 3),  # 22 in packs of 10, where a 4 has no room beside a 7
        ([12, 5, 5], 2),  # beyond the limit: a pack of its own
    ],
)
def test_it_is_a_number_that_can_be_written(text: list[int], packs: int) -> None:
    loads = Loads(np.zeros(len(text), dtype=np.int64), np.array(text))
    assert json.dumps(least_packs(loads, Limits(vision=10, text=10))) == str(packs)
