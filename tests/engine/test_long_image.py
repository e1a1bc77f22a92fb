"""One image of 65,536 patches (3584 × 3584 pixels) over four vision ranks: equal to the plain model in one process. And
one that is just too large for its keys and values to be gathered at once."""

from __future__ import annotations

import pytest

from dhp.core.axes import Degrees
from dhp.parallel.attention.segment_plan import GATHER_TOKENS
from tests.engine.test_parity import assert_exact, assert_exact_in_single_precision
from tests.helpers import ranks
from tests.helpers.layouts import Case, compare
from tests.helpers.tiny import IMAGE_TOKEN, make_sample


@pytest.mark.grid
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("vision", [Degrees(ulysses=4), Degrees(ring=2, ulysses=2)], ids=str)
def test_an_image_of_65536_patches_equals_the_plain_model(
    vision: Degrees, made_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "TIMEOUT_S", 3600)  # minutes a pass on two cores
    step = [make_sample([(1, 256, 256)], 12, 8, 1, IMAGE_TOKEN)]
    case = Case(vision, Degrees(tensor=2), micro_batches=1, dtype="float32", packing=True)
    assert_exact_in_single_precision(compare(made_model, case, [step]))


@pytest.mark.parametrize("vision", [Degrees(ring=4), Degrees(ring=2, ulysses=2)], ids=str)
def test_keys_that_travel_around_the_ring_equal_the_plain_model(vision: Degrees, made_model: str) -> None:
    step = [make_sample([(1, 16, 48)], 12, 8, 1, IMAGE_TOKEN)]
    assert 16 * 48 > GATHER_TOKENS
    assert_exact(compare(made_model, Case(vision, Degrees(), micro_batches=1), [step]))
