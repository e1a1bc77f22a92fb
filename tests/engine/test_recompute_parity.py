"""Whatever is recomputed, the numbers are those of the plain model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from dhp.core.axes import Degrees
from tests.engine.test_parity import assert_exact
from tests.helpers.batches import awkward_steps
from tests.helpers.layouts import Case, Trained, compare, train
from tests.helpers.rows import on_demand, slow

ONE = Degrees()

# The vision tower has four layers and the decoder two, so that an item beyond 1 would not do for both.
EXACT = [
    on_demand(Case(ONE, ONE, recompute="light")),
    on_demand(Case(ONE, ONE, recompute="mlp", packing=True)),
    Case(ONE, ONE, recompute="linear:0,mlp:1"),
    on_demand(Case(Degrees(ulysses=2), Degrees(tensor=2), recompute="light", packing=True)),
    on_demand(Case(Degrees(ulysses=2), Degrees(tensor=2), recompute="mlp")),
    on_demand(Case(Degrees(ulysses=4), Degrees(tensor=2), recompute="linear", packing=True, schedule="vision_ahead")),
    on_demand(Case(Degrees(data=2, tensor=2), Degrees(data=2), recompute="light")),
    on_demand(Case(Degrees(tensor=2), Degrees(tensor=4), recompute="linear:1,all:0", micro_batches=3)),
    on_demand(Case(Degrees(ulysses=2, tensor=2), Degrees(tensor=2), recompute="0", packing=True)),
    on_demand(Case(Degrees(ulysses=2), Degrees(tensor=2), recompute="light:0,mlp:1", autotp=True)),
    on_demand(Case(Degrees(ring=2, ulysses=2), ONE, recompute="light")),
    on_demand(Case(Degrees(ring=2), ONE, recompute="linear:0,all:1", packing=True)),
]


@pytest.mark.parametrize("case", EXACT, ids=str)
def test_equals_plain_model_in_double_precision(case: Case, made_model: str) -> None:
    assert_exact(compare(made_model, case, awkward_steps()))


@pytest.mark.grid
def test_key_value_heads_that_ranks_share(few_keys_model: str) -> None:
    assert_exact(compare(few_keys_model, Case(ONE, Degrees(tensor=4), recompute="light"), awkward_steps()))


KEPT = Case(Degrees(ulysses=2), Degrees(tensor=2), dtype="float32", packing=True)


@pytest.fixture(scope="module")
def plain(made_model: str) -> Trained:
    return train(made_model, KEPT, awkward_steps())


@pytest.mark.parametrize("recompute", [slow("light"), "mlp", "linear", "full", slow("light:0,all:1")])
def test_the_same_to_the_bit_as_without(recompute: str, plain: Trained, made_model: str) -> None:
    again = train(made_model, replace(KEPT, recompute=recompute), awkward_steps())
    assert plain.losses == again.losses
    assert plain.norms == again.norms
    for ours, theirs in zip(plain.weights, again.weights, strict=True):
        assert all(torch.equal(weight, theirs[0][name]) for name, weight in ours[0].items())


ZERO = [
    on_demand(
        Case(Degrees(ulysses=2), Degrees(data=2), 1, "float32", 3, recompute="light", packing=True, text_zero_stage=3)
    ),
    on_demand(Case(Degrees(ulysses=2), Degrees(data=2), 2, "float32", 1, recompute="mlp", text_zero_stage=2)),
]


@pytest.mark.parametrize("case", ZERO, ids=str)
def test_zero(case: Case, made_model: str) -> None:
    from tests.engine.test_parity import assert_exact_in_single_precision

    assert_exact_in_single_precision(compare(made_model, case, awkward_steps()))
