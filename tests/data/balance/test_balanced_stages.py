"""Packs constant in vision and text: which samples no pack can complete."""

import numpy as np
import pytest

from dhp.data.balance.balanced_stages import _text_heavy
from dhp.data.balance.packs import Limits

ORDINARY = [(1.0, 50.0)] * 40
# A pack is to hold 10 units of vision and 1,000 tokens, and a unit costs 50 tokens at least.
CASES = {
    "room for 60 beside a unit": (9.0, 940.0, False),
    "room for 40 beside a unit": (9.0, 960.0, True),
    "room for 510 beside ten units": (0.0, 490.0, False),
    "room for 490 beside ten units": (0.0, 510.0, True),
    "too much vision": (11.0, 600.0, True),
    "too much text": (1.0, 1100.0, True),
    "half of both": (5.0, 700.0, False),
    "another half": (5.0, 700.0, False),
}


@pytest.mark.parametrize("case", CASES)
def test_heavy_is_what_no_others_can_complete(case: str) -> None:
    vision, text = np.array([*ORDINARY, *((v, t) for v, t, _ in CASES.values())]).T
    assert (vision.sum(), text.sum()) == (80, 8000)
    found = _text_heavy(vision, text, Limits(vision=10, text=1000))
    assert not found[: len(ORDINARY)].any()
    assert found[len(ORDINARY) + [*CASES].index(case)] == CASES[case][2]
