"""Every mode of vision with every mode of text, packed and padded, 1 and 3 micro-batches: equal to the plain model.

A quarter of an hour, so only on demand: `make test ARGS='-m grid'`. The rows of test_pairs.py, which always run, cover
each pair of features, those of test_parity.py uneven and larger degrees.
"""

from __future__ import annotations

from itertools import product

import pytest

from dhp.core.axes import Degrees
from tests.engine.test_parity import assert_exact, assert_exact_in_single_precision
from tests.helpers.batches import awkward_steps
from tests.helpers.layouts import Case, compare, compare_rounding

Mode = tuple[Degrees, int]  # degrees, ZeRO stage

VISION: dict[str, Mode] = {
    "none": (Degrees(), 0),
    "data": (Degrees(data=2), 0),
    "sequence": (Degrees(ulysses=2), 0),
    "tensor": (Degrees(tensor=2), 0),
    **{f"deepspeed{stage}": (Degrees(data=2), stage) for stage in (1, 2, 3)},
}
TEXT: dict[str, Mode] = {
    "none": (Degrees(), 0),
    "data": (Degrees(data=2), 0),
    "tensor": (Degrees(tensor=2), 0),
    **{f"deepspeed{stage}": (Degrees(data=2), stage) for stage in (1, 2, 3)},
}


def make_case(vision: str, text: str, packing: bool, micro_batches: int) -> Case:
    """DeepSpeed refuses float64, so its modes run in float32."""
    (of_vision, stage), (of_text, text_stage) = VISION[vision], TEXT[text]
    dtype = "float32" if stage or text_stage else "float64"
    return Case(of_vision, of_text, micro_batches, dtype, zero_stage=stage, text_zero_stage=text_stage, packing=packing)


GRID = [
    pytest.param(vision, text, packing, micro, id=f"{vision}-{text}-{'packed' if packing else 'padded'}-{micro}")
    for vision, text, packing, micro in product(VISION, TEXT, (True, False), (1, 3))
]


@pytest.mark.grid
@pytest.mark.parametrize(("vision", "text", "packing", "micro_batches"), GRID)
def test_equals_plain_model(vision: str, text: str, packing: bool, micro_batches: int, made_model: str) -> None:
    case = make_case(vision, text, packing, micro_batches)
    errors = compare(made_model, case, awkward_steps())
    if case.dtype == "float64":
        assert_exact(errors)
    else:
        assert_exact_in_single_precision(errors)


FSDP = [
    pytest.param(data, tensor, stage, schedule, dtype, id=f"data{data}-tensor{tensor}-stage{stage}-{schedule}-{dtype}")
    for data, tensor, stage, schedule, dtype in product(
        (2, 3), (1, 2), (2, 3), ("sequential", "vision_ahead"), ("float64", "float32", "bfloat16")
    )
]


@pytest.mark.grid
@pytest.mark.parametrize(("data", "tensor", "stage", "schedule", "dtype"), FSDP)
def test_states_cut_by_torch(data: int, tensor: int, stage: int, schedule: str, dtype: str, made_model: str) -> None:
    degrees = Degrees(data=data, tensor=tensor)
    case = Case(degrees, degrees, 4 - data, dtype, stage, False, schedule, True, stage, fsdp=True)
    if dtype == "bfloat16":
        ratios = compare_rounding(made_model, case, awkward_steps())
        assert max(ratios.loss, ratios.gradient, ratios.update) < 2.5, ratios
    else:
        check = assert_exact if dtype == "float64" else assert_exact_in_single_precision
        check(compare(made_model, case, awkward_steps()))
