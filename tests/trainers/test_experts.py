"""Decoders with experts: sharded equals plain, with the same routing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from dhp.base.degrees import Degrees
from dhp.data.sample import Sample
from tests.helpers.layouts import Case, Fault, InspectedText, compare
from tests.helpers.norms import exact_norms, use_exact_norms
from tests.helpers.tiny import IMAGE_TOKEN, make_sample
from tests.trainers.test_families import steps
from tests.trainers.test_parity import assert_exact, assert_exact_in_single_precision

ONE = Degrees()


@pytest.fixture(scope="module", autouse=True)
def exact() -> Iterator[None]:
    with exact_norms():
        yield


class ExactText(InspectedText):
    """On ranks, without the float32 of norms and routers."""

    def __init__(self, *given: Any):
        use_exact_norms(setattr)
        super().__init__(*given)


EXACT = [
    Case(Degrees(ulysses=2), Degrees(data=2), packing=True),
    Case(ONE, Degrees(tensor=2), micro_batches=2),
    Case(ONE, Degrees(data=2, tensor=4), micro_batches=2, packing=True, checkpointing=True),
]
SINGLE = [
    Case(ONE, Degrees(data=2), dtype="float32", text_zero_stage=2),
    Case(Degrees(data=2), Degrees(data=2), dtype="float32", zero_stage=3, text_zero_stage=3, packing=True),
]


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_equals_the_plain_model_in_double_precision(case: Case, experts_model: str) -> None:
    assert_exact(compare(experts_model, case, steps(), Fault(text=ExactText)))


@pytest.mark.parametrize("case", SINGLE, ids=str)
def test_equals_the_plain_model_in_single_precision(case: Case, experts_model: str) -> None:
    assert_exact_in_single_precision(compare(experts_model, case, steps(), Fault(text=ExactText)))


def qwen_steps() -> list[list[Sample]]:
    """Images of several sizes, two in a sample, none; a step without any."""
    make = lambda *given: make_sample(*given, IMAGE_TOKEN)
    return [
        [
            make([(1, 4, 6)], 9, 4, 1),
            make([(1, 4, 4), (1, 6, 2)], 7, 5, 2),
            make([], 8, 5, 3),
            make([(1, 4, 4)], 8, 5, 4),
        ],
        [make([], 5 + seed, 3, seed) for seed in (31, 32, 33, 34)],
    ]


QWEN = [
    Case(Degrees(data=2), Degrees(data=2), packing=True),
    Case(Degrees(ulysses=2), Degrees(tensor=2), micro_batches=2, stages=2),
]


@pytest.mark.parametrize("case", QWEN, ids=str)
def test_qwen3_vl_with_experts_equals_the_plain_model(case: Case, qwen3_vl_moe_model: str) -> None:
    assert_exact(compare(qwen3_vl_moe_model, case, qwen_steps(), Fault(text=ExactText)))


SHARED = [
    Case(ONE, Degrees(data=2, expert=2), micro_batches=2),
    Case(ONE, Degrees(data=4, expert=2), micro_batches=1, packing=True, checkpointing=True),
]


@pytest.mark.parametrize("case", SHARED, ids=str)
def test_experts_shared_out_equal_the_plain_model(case: Case, experts_model: str) -> None:
    assert_exact(compare(experts_model, case, steps(), Fault(text=ExactText)))
