"""Other model families through the same layouts: sharded equals plain."""

from __future__ import annotations

import pytest

from dhp.data.sample import Sample
from dhp.parallel.mesh import Degrees
from tests.helpers.layouts import Case, compare
from tests.helpers.tiny import IMAGE_TOKEN, make_sample
from tests.trainers.test_parity import assert_exact, assert_exact_in_single_precision

ONE = Degrees()
IMAGE = (1, 4, 4)

LLAVA = [
    Case(ONE, ONE),
    Case(Degrees(ulysses=2), Degrees(tensor=2), micro_batches=1),  # images shared by the ranks of a "sequence"
    Case(Degrees(ulysses=4), Degrees(data=2), micro_batches=1, packing=True),
    Case(Degrees(ring=2, ulysses=2), Degrees(tensor=4), 3, packing=True, checkpointing=True),
    Case(Degrees(data=2, tensor=2), Degrees(data=2, tensor=2)),
    Case(Degrees(ulysses=2), Degrees(tensor=2), dtype="float32", zero_stage=1),
    Case(Degrees(data=2), Degrees(data=2), dtype="float32", zero_stage=3, text_zero_stage=3, packing=True),
]


def make(images: int, tokens: int, targets: int, seed: int) -> Sample:
    return make_sample([IMAGE] * images, tokens, targets, seed, IMAGE_TOKEN, unit=1, values=3 * 14 * 14)


def steps() -> list[list[Sample]]:
    """Images in uneven numbers, several in a sample, none at all, fewer than ranks."""
    return [
        [make(1, 5, 3, 1), make(3, 9, 8, 2), make(0, 6, 1, 3), make(1, 4, 2, 4)],
        [make(0, n, n - 2, 10 + n) for n in (5, 9, 4, 7)],
        [make(0, 8, 5, 21), make(1, 5, 4, 22), make(0, 6, 3, 23), make(0, 4, 1, 24)],
    ]


@pytest.mark.parametrize("case", LLAVA, ids=str)
def test_llava_equals_the_plain_model(case: Case, llava_model: str) -> None:
    check = assert_exact if case.dtype == "float64" else assert_exact_in_single_precision
    check(compare(llava_model, case, steps()))
