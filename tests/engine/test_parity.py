"""Sharded equals plain: loss, gradient norm, every gradient, the update after three steps, in every layout."""

from __future__ import annotations

import pytest
import torch

from dhp.core.axes import Degrees
from tests.helpers.batches import awkward_steps
from tests.helpers.layouts import Case, Errors, compare, train
from tests.helpers.rows import on_demand, slow

ONE = Degrees()


def assert_exact(errors: Errors) -> None:
    """The limits of double precision."""
    assert errors.loss < 1e-9, errors
    assert errors.norm < 1e-9, errors
    assert errors.gradient < 1e-9, errors
    assert errors.update < 1e-6, errors


EXACT = [
    Case(ONE, ONE),
    on_demand(Case(Degrees(ulysses=2), Degrees(tensor=2))),
    on_demand(Case(Degrees(ulysses=4), Degrees(tensor=4))),
    Case(Degrees(ulysses=4), ONE, micro_batches=1),
    on_demand(Case(Degrees(data=2), Degrees(tensor=2))),
    on_demand(Case(Degrees(data=2), Degrees(tensor=4), micro_batches=4)),
    on_demand(Case(Degrees(data=2, ulysses=2), Degrees(data=2, tensor=2))),
    on_demand(Case(Degrees(ulysses=2), Degrees(data=2), micro_batches=1)),
    on_demand(Case(ONE, Degrees(data=2, tensor=2))),
    on_demand(Case(Degrees(ulysses=2), Degrees(tensor=2), checkpointing=True)),
    on_demand(Case(Degrees(ulysses=2), Degrees(tensor=2), micro_batches=4, schedule="vision_ahead")),
    on_demand(Case(Degrees(ring=2), Degrees(tensor=2))),
    on_demand(Case(Degrees(ring=2, ulysses=2), Degrees(tensor=2), checkpointing=True)),
    Case(Degrees(ring=4), Degrees(data=2), micro_batches=1, packing=True),
    Case(Degrees(ring=3), ONE, micro_batches=1),
    on_demand(Case(Degrees(ring=2, tensor=2), ONE, micro_batches=1)),
    on_demand(Case(Degrees(tensor=2), Degrees(tensor=2))),
    Case(Degrees(tensor=4), ONE, micro_batches=3),
    on_demand(Case(Degrees(data=2, tensor=2), Degrees(data=2), checkpointing=True)),
    on_demand(Case(Degrees(ulysses=2, tensor=2), Degrees(tensor=2), micro_batches=3, packing=True)),
    on_demand(Case(ONE, ONE, micro_batches=1, packing=True)),
    on_demand(Case(Degrees(ulysses=2), Degrees(tensor=2), packing=True)),
    on_demand(Case(Degrees(data=2), Degrees(data=2, tensor=2), packing=True, checkpointing=True)),
    on_demand(Case(Degrees(ulysses=2), Degrees(tensor=4), 3, autotp=True)),
    on_demand(Case(ONE, Degrees(data=2, tensor=2), packing=True, checkpointing=True, autotp=True)),
    on_demand(Case(Degrees(data=2), Degrees(data=2, tensor=2), 2, zero_stage=3, text_zero_stage=3, fsdp=True)),
    on_demand(
        Case(
            ONE, Degrees(data=2, tensor=2), 4, schedule="vision_ahead", text_zero_stage=3, checkpointing=True, fsdp=True
        )
    ),
    slow(Case(Degrees(data=2, tensor=2), Degrees(data=3), 2, "float64", 2, packing=True, text_zero_stage=2, fsdp=True)),
    on_demand(
        Case(Degrees(ulysses=2), Degrees(data=3, tensor=2), 1, zero_stage=3, text_zero_stage=2, packing=True, fsdp=True)
    ),
]
SINGLE = [
    Case(ONE, ONE, dtype="float32"),
    on_demand(Case(Degrees(ulysses=2), Degrees(tensor=2), dtype="float32")),
    on_demand(  # DeepSpeed refuses float64, so its cases run in float32 alone.
        Case(Degrees(ulysses=2), Degrees(tensor=2), dtype="float32", zero_stage=1)
    ),
    on_demand(Case(Degrees(ulysses=4), Degrees(tensor=1), dtype="float32", zero_stage=1, micro_batches=4)),
    on_demand(Case(Degrees(data=2), Degrees(data=2), dtype="float32", zero_stage=1)),
    on_demand(Case(Degrees(ulysses=2), Degrees(tensor=2), 4, dtype="float32", zero_stage=1, schedule="vision_ahead")),
    on_demand(Case(Degrees(data=2, ulysses=2), Degrees(tensor=2), dtype="float32", zero_stage=1)),
    on_demand(Case(Degrees(ulysses=2), Degrees(tensor=2), 1, dtype="float32", zero_stage=2)),
    slow(Case(Degrees(data=3), ONE, 3, dtype="float32", zero_stage=3)),
    on_demand(Case(ONE, Degrees(data=2), 3, dtype="float32", text_zero_stage=1)),
    Case(ONE, Degrees(data=3), 1, dtype="float32", text_zero_stage=3, packing=True),
    on_demand(
        Case(Degrees(ulysses=2), Degrees(data=2), 1, dtype="float32", zero_stage=1, text_zero_stage=1, packing=True)
    ),
    on_demand(
        Case(Degrees(data=2), Degrees(data=2), 3, dtype="float32", zero_stage=2, text_zero_stage=2, packing=True)
    ),
    on_demand(Case(Degrees(data=2), Degrees(data=2), 3, dtype="float32", zero_stage=3, text_zero_stage=3)),
    on_demand(Case(Degrees(ulysses=2), Degrees(data=2), 4, "float32", 2, schedule="vision_ahead", text_zero_stage=2)),
    on_demand(
        Case(Degrees(ulysses=2), Degrees(data=2), 1, "float32", 3, checkpointing=True, packing=True, text_zero_stage=3)
    ),
]


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_equals_plain_model_in_double_precision(case: Case, made_model: str) -> None:
    errors = compare(made_model, case, awkward_steps())
    assert_exact(errors)


def assert_exact_in_single_precision(errors: Errors) -> None:
    assert errors.loss < 1e-5, errors
    assert errors.norm < 1e-5, errors
    assert errors.gradient < 1e-4, errors
    # Adam divides by the gradient's size, so that rounding in small ones shows: 2e-4 here, on one rank as on several.
    assert errors.update < 1e-3, errors


@pytest.mark.parametrize("case", SINGLE, ids=str)
def test_equals_plain_model_in_single_precision(case: Case, made_model: str) -> None:
    assert_exact_in_single_precision(compare(made_model, case, awkward_steps()))


@pytest.mark.grid
def test_autotp_of_a_head_that_is_the_embedding(few_keys_model: str) -> None:
    assert_exact(compare(few_keys_model, Case(ONE, Degrees(tensor=2), autotp=True), awkward_steps()))


@pytest.mark.grid
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_of_a_head_that_is_the_embedding(stage: int, few_keys_model: str) -> None:
    case = Case(ONE, Degrees(data=2), dtype="float32", text_zero_stage=stage, packing=stage == 3)
    assert_exact_in_single_precision(compare(few_keys_model, case, awkward_steps()))


REPEATED = [
    Case(Degrees(data=2), Degrees(tensor=2), dtype="float32", zero_stage=1),
    slow(Case(Degrees(data=2), Degrees(data=2), dtype="float32", zero_stage=3, text_zero_stage=2)),
]


@pytest.mark.parametrize("case", REPEATED, ids=str)
def test_the_same_run_twice_is_the_same_to_the_bit_on_every_rank(case: Case, made_model: str) -> None:
    first, second = (train(made_model, case, awkward_steps()) for _ in range(2))
    assert first.losses == second.losses
    assert first.norms == second.norms
    for ours, theirs in zip(first.weights, second.weights, strict=True):
        for name, weight in ours[0].items():
            # Copies that drift apart between ranks would train a model that exists nowhere.
            assert all(torch.equal(weight, of_rank[name]) for of_rank in (*ours, *theirs)), name


SHARED_KEYS = [
    Case(ONE, Degrees(tensor=4)),
    on_demand(Case(Degrees(ulysses=2), Degrees(tensor=8), micro_batches=1)),
    on_demand(Case(ONE, Degrees(data=2, tensor=4))),
    on_demand(Case(ONE, Degrees(tensor=4), micro_batches=1, packing=True)),
    slow(Case(ONE, Degrees(data=2, tensor=4), text_zero_stage=3, fsdp=True)),
]


@pytest.mark.parametrize("case", SHARED_KEYS, ids=str)
def test_ranks_that_share_a_key_value_head_equal_the_plain_model(case: Case, few_keys_model: str) -> None:
    errors = compare(few_keys_model, case, awkward_steps())
    assert_exact(errors)
