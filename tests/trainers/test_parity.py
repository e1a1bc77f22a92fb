"""Sharded equals plain: loss, gradient norm, every gradient, the update after three steps, in every layout."""

from __future__ import annotations

import pytest

from dhp.data.sample import Sample
from dhp.parallel.mesh import Degrees
from tests.helpers.layouts import Case, compare
from tests.helpers.tiny import IMAGE_TOKEN, make_sample

ONE = Degrees()


def steps() -> list[list[Sample]]:
    """Three steps that hold every awkward thing at once."""
    make = lambda grids, tokens, targets, seed: make_sample(grids, tokens, targets, seed, IMAGE_TOKEN)
    mixed = [
        make([(1, 6, 10)], 5, 3, 1),  # windows of unequal size, 6 of them
        make([(1, 4, 6), (1, 8, 2)], 9, 8, 2),  # two images in a sample, many targets
        make([], 6, 1, 3),  # no image, one target
        make([(1, 10, 14)], 4, 2, 4),  # 12 windows, the largest image
    ]
    no_image = [make([], n, n - 2, 10 + n) for n in (5, 9, 4, 7)]
    one_window = [make([], 8, 5, 21), make([], 5, 4, 22), make([(1, 2, 2)], 6, 3, 23), make([], 4, 1, 24)]
    return [mixed, no_image, one_window]


EXACT = [
    Case(ONE, ONE),
    Case(Degrees(ulysses=2), Degrees(tensor=2)),
    Case(Degrees(ulysses=4), Degrees(tensor=4)),
    Case(Degrees(ulysses=4), ONE, micro_batches=1),
    Case(Degrees(data=2), Degrees(tensor=2)),
    Case(Degrees(data=2), Degrees(tensor=4), micro_batches=4),
    Case(Degrees(data=2, ulysses=2), Degrees(data=2, tensor=2)),
    Case(Degrees(ulysses=2), Degrees(data=2), micro_batches=1),
    Case(ONE, Degrees(data=2, tensor=2)),
    Case(Degrees(ulysses=2), Degrees(tensor=2), checkpointing=True),
]
SINGLE = [
    Case(ONE, ONE, dtype="float32"),
    Case(Degrees(ulysses=2), Degrees(tensor=2), dtype="float32"),
    # DeepSpeed refuses float64, so its cases run in float32 alone.
    Case(Degrees(ulysses=2), Degrees(tensor=2), dtype="float32", zero_stage=1),
    Case(Degrees(ulysses=4), Degrees(tensor=1), dtype="float32", zero_stage=1, micro_batches=4),
    Case(Degrees(data=2), Degrees(data=2), dtype="float32", zero_stage=1),
    Case(Degrees(data=2, ulysses=2), Degrees(tensor=2), dtype="float32", zero_stage=1),
]


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_equals_plain_model_in_double_precision(case: Case, made_model: str) -> None:
    errors = compare(made_model, case, steps())
    assert errors.loss < 1e-9, errors
    assert errors.norm < 1e-9, errors
    assert errors.gradient < 1e-9, errors
    assert errors.update < 1e-6, errors


@pytest.mark.parametrize("case", SINGLE, ids=str)
def test_equals_plain_model_in_single_precision(case: Case, made_model: str) -> None:
    errors = compare(made_model, case, steps())
    assert errors.loss < 1e-5, errors
    assert errors.norm < 1e-5, errors
    assert errors.gradient < 1e-4, errors
