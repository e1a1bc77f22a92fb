"""A decoder cut into pipeline stages equals the plain model under every schedule, and with tied or frozen weights."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from dhp.core.axes import Degrees
from dhp.core.batch import Bundle, StepInfo
from tests.engine.test_parity import assert_exact, assert_exact_in_single_precision
from tests.helpers.batches import awkward_steps, mixed_step
from tests.helpers.layouts import Case, Errors, Fault, InspectedText, compare
from tests.helpers.rows import on_demand, slow

ONE = Degrees()
CASES = [
    on_demand(Case(ONE, ONE, 2, stages=2)),
    on_demand(Case(ONE, ONE, 1, stages=2, schedule="1f1b", packing=True)),
    on_demand(Case(Degrees(data=2), Degrees(tensor=2), 4, stages=2, schedule="1f1b", packing=True)),
    on_demand(Case(Degrees(ulysses=2), Degrees(data=2), 4, stages=4, schedule="gpipe", checkpointing=True)),
    on_demand(Case(ONE, Degrees(data=2, tensor=2), 4, stages=2, chunks=2, schedule="interleaved", packing=True)),
    Case(Degrees(ring=2), ONE, 4, stages=2, chunks=2, schedule="interleaved", recompute="mlp:0-1,all:3"),
    slow(Case(ONE, ONE, 3, stages=4, schedule="1f1b")),
    on_demand(
        Case(Degrees(data=2), Degrees(data=2, tensor=2), 2, stages=2, schedule="1f1b", text_zero_stage=3, fsdp=True)
    ),
]
TIED = [
    Case(ONE, ONE, 2, stages=2, schedule="1f1b"),
    on_demand(Case(ONE, Degrees(data=2, tensor=2), 4, stages=2, chunks=2, schedule="interleaved", packing=True)),
    on_demand(Case(Degrees(ulysses=2), Degrees(data=2), 2, stages=4, schedule="gpipe", text_zero_stage=3, fsdp=True)),
    on_demand(Case(ONE, Degrees(data=2, tensor=2), 2, stages=2, schedule="1f1b", text_zero_stage=2, fsdp=True)),
]
TIED_SINGLE = [  # whose states DeepSpeed cuts, at other places in the first stage than in the last
    Case(ONE, Degrees(data=2), 2, "float32", stages=2, schedule="1f1b", text_zero_stage=1),
    on_demand(Case(ONE, Degrees(data=2), 2, "float32", stages=2, schedule="1f1b", text_zero_stage=2, packing=True)),
    on_demand(Case(Degrees(data=2), Degrees(data=2), 2, "float32", stages=2, schedule="gpipe", text_zero_stage=1,
         frozen=("embed_tokens",))),
]  # fmt: skip
SINGLE = [
    on_demand(Case(Degrees(ulysses=2), Degrees(tensor=2), 4, "float32", 1, stages=2, schedule="1f1b", packing=True)),
    on_demand(Case(ONE, Degrees(data=2), 2, "float32", stages=2, schedule="1f1b", text_zero_stage=1)),
    on_demand(Case(ONE, Degrees(data=2), 4, "float32", stages=2, chunks=2, schedule="interleaved", text_zero_stage=2)),
]
FROZEN = [
    on_demand(Case(Degrees(data=2), Degrees(tensor=2), 2, frozen=("vision", "projector"), packing=True)),
    Case(Degrees(ulysses=2), ONE, 4, frozen=("vision", "projector"), stages=2, schedule="1f1b"),
    on_demand(Case(Degrees(data=2), Degrees(tensor=2), 4, stages=2, schedule="1f1b", frozen=("text",))),
    on_demand(Case(Degrees(ulysses=2), ONE, 2, frozen=("vision",), checkpointing=True)),
    Case(ONE, Degrees(data=2), 2, frozen=("vision", "text"), packing=True),
    on_demand(Case(Degrees(data=2), ONE, 2, zero_stage=3, fsdp=True, frozen=("vision",))),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_stages_equal_the_plain_model(case: Case, four_layers_model: str) -> None:
    assert_exact(compare(four_layers_model, case, awkward_steps()))


@pytest.mark.parametrize("case", TIED, ids=str)
def test_a_weight_of_two_stages_is_one_weight(case: Case, tied_model: str) -> None:
    assert_exact(compare(tied_model, case, awkward_steps()))


@pytest.mark.parametrize("case", TIED_SINGLE, ids=str)
def test_a_weight_of_two_stages_is_one_weight_however_its_states_are_cut(case: Case, tied_model: str) -> None:
    assert_exact_in_single_precision(compare(tied_model, case, awkward_steps()))


@pytest.mark.parametrize("case", SINGLE, ids=str)
def test_stages_in_single_precision(case: Case, four_layers_model: str) -> None:
    assert_exact_in_single_precision(compare(four_layers_model, case, awkward_steps()))


@pytest.mark.parametrize("case", FROZEN, ids=str)
def test_what_is_frozen_stays_and_all_else_is_as_in_the_plain_model(case: Case, four_layers_model: str) -> None:
    assert_exact(compare(four_layers_model, case, awkward_steps()))


@pytest.mark.grid
def test_llava_in_stages_and_its_projector_alone(llava_model: str) -> None:
    from tests.engine.test_families import steps

    for case in (
        Case(Degrees(ulysses=2), ONE, 2, stages=2, schedule="1f1b", packing=True),
        Case(ONE, Degrees(tensor=2), 2, frozen=("vision",)),
    ):
        assert_exact(compare(llava_model, case, steps()))


class TiedGradientNotAdded(InspectedText):
    """Each stage updates its copy of the embedding with its own share."""

    def grad_norm_sq(self, info: StepInfo, *tied: Bundle) -> float:
        return super().grad_norm_sq(info)


class TiedGradientCountedTwice(InspectedText):
    """Both stages count the embedding in the norm."""

    def __init__(self, settings: Any):
        super().__init__(settings)
        self.optimizer._is_others = lambda name: False


class GradientOfStatesLost(InspectedText):
    """What goes back to the stage before is nothing."""

    def backward_step(self, *given: Any) -> tuple[Bundle, ...]:
        found = super().backward_step(*given)
        lost = lambda name, tensor: torch.zeros_like(tensor) if name == "hidden_states" else tensor
        return tuple(Bundle({n: lost(n, t) for n, t in b.tensors.items()}) for b in found)


FAULTS = [
    ("tied gradient not added", TiedGradientNotAdded, lambda e: e.gradient < 1e-9 < 1e-3 < e.update),
    ("tied gradient counted twice", TiedGradientCountedTwice, lambda e: e.gradient < 1e-9 < 1e-3 < e.norm),
    ("gradient of states lost", GradientOfStatesLost, lambda e: e.loss < 1e-9 < 0.1 < e.gradient),
]


@pytest.mark.parametrize(("fault", "seen"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_a_planted_mistake_is_seen(fault: type, seen: Any, tied_model: str) -> None:
    errors: Errors = compare(tied_model, TIED[0], [mixed_step()], Fault(text=fault))
    assert seen(errors), errors


VISION = {"none": ONE, "data": Degrees(data=2), "sequence": Degrees(ulysses=2)}
SCHEDULES = (("sequential", 1), ("gpipe", 1), ("1f1b", 1), ("interleaved", 2))
GRID = [
    pytest.param(
        Case(VISION[vision], Degrees(data=data, tensor=tensor), micro, stages=stages, chunks=chunks, schedule=schedule,
             packing=(data + tensor + stages) % 2 == 0),
        tied, id=f"{stages}-tensor{tensor}-data{data}-{vision}-{micro}-{schedule}-{'tied' if tied else 'own head'}",
    )
    for stages, tensor, data, vision, micro, (schedule, chunks), tied in product(
        (2, 4), (1, 2), (1, 2), VISION, (1, 4), SCHEDULES, (False, True)
    )
    if schedule != "interleaved" or (stages == 2 and micro == 4)
]  # fmt: skip


@pytest.mark.grid
@pytest.mark.parametrize(("case", "tied"), GRID)
def test_every_pipeline_equals_the_plain_model(case: Case, tied: bool, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue("tied_model" if tied else "four_layers_model")
    assert_exact(compare(model, case, awkward_steps()))
