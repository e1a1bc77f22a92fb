"""Heads that ranks do not divide: equal to the plain model, whose weights every rank's checkpoint has."""

from itertools import product

import pytest

from dhp.core.axes import Degrees
from tests.engine.test_activations import DROPPING
from tests.engine.test_adapters import BOTH
from tests.engine.test_sequence_decoder import steps
from tests.helpers.alike import assert_exact
from tests.helpers.layouts import Case, compare

ONE = Degrees()
TEXT = [
    Degrees(tensor=2),  # 5 and 4 query heads
    Degrees(tensor=4),  # 3, 2, 2, 2 of 3 key/value heads
    Degrees(ulysses=2),  # 5 and 4, and a head of zeros
    Degrees(ulysses=5),  # 2, 2, 2, 2, 1
    Degrees(tensor=2, ulysses=2),
    Degrees(ring=2, ulysses=2),
]
MATRIX = [
    Case(vision, text, micro, packing=packing, stages=stages)
    for text, stages, (vision, micro, packing) in product(
        TEXT, (1, 2), ((Degrees(ulysses=2), 2, True), (Degrees(data=2), 1, False))
    )
]
SOME = [
    Case(Degrees(ulysses=2), Degrees(tensor=2), 1, packing=True),
    Case(ONE, Degrees(ulysses=2), 2),
    Case(Degrees(ulysses=2, ring=2), Degrees(tensor=2, ulysses=2), 1),
    Case(ONE, Degrees(tensor=2), 1, sharded_norms=True),
    Case(ONE, Degrees(tensor=2, data=2), 1, text_zero_stage=3, fsdp=True),
    Case(ONE, Degrees(tensor=4), 2, recompute="light"),
    Case(ONE, Degrees(tensor=2), 2, lora=BOTH),
    Case(ONE, Degrees(tensor=2), 2, lora=DROPPING, sharded_norms=True),
]


@pytest.mark.grid
@pytest.mark.parametrize("case", MATRIX, ids=str)
def test_every_mesh_equals_the_plain_model(case: Case, nine_heads_model: str) -> None:
    assert_exact(compare(nine_heads_model, case, steps()))


@pytest.mark.parametrize("case", SOME, ids=str)
def test_equals_the_plain_model(case: Case, nine_heads_model: str) -> None:
    assert_exact(compare(nine_heads_model, case, steps()))
