"""A tower cut into pipeline stages, and the chain that it makes with the decoder's, equal the plain model."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from dhp.core.axes import Degrees
from dhp.core.batch import Bundle
from tests.engine.test_families import steps as images_and_videos
from tests.helpers.alike import assert_exact
from tests.helpers.batches import awkward_steps
from tests.helpers.layouts import Case, Errors, Fault, InspectedVision, compare
from tests.helpers.rows import slow

ONE = Degrees()
CASES = [
    Case(ONE, ONE, 2, tower_stages=2),
    slow(Case(Degrees(tensor=2), Degrees(tensor=2), 4, tower_stages=2, stages=2, schedule="1f1b", packing=True)),
]
DEEPSTACK = [Case(Degrees(data=2), Degrees(tensor=2), 2, tower_stages=2, stages=2, schedule="1f1b", packing=True)]
PARTLY = [  # what is before the first trained weight gets no gradient
    Case(ONE, ONE, 2, tower_stages=2, schedule="vision_ahead", frozen=("blocks.[01]", "patch_embed"))
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_stages_equal_the_plain_model(case: Case, four_layers_model: str) -> None:
    assert_exact(compare(four_layers_model, case, awkward_steps()))


@pytest.mark.parametrize("case", DEEPSTACK, ids=str)
def test_features_leave_from_the_stage_that_makes_them(case: Case, qwen3_vl_model: str) -> None:
    assert_exact(compare(qwen3_vl_model, case, images_and_videos()))


@pytest.mark.parametrize("case", PARTLY, ids=str)
def test_frozen_layers_on_either_side_of_the_cut(case: Case, four_layers_model: str) -> None:
    assert_exact(compare(four_layers_model, case, awkward_steps()))


class GradientOfStatesLost(InspectedVision):
    """What goes back to the stage before is nothing."""

    def backward_step(self, *given: Any) -> tuple[Bundle, ...]:
        found = super().backward_step(*given)
        return tuple(Bundle({name: torch.zeros_like(tensor) for name, tensor in b.tensors.items()}) for b in found)


class PositionsAddedAgain(InspectedVision):
    """Each stage embeds positions, as the first one does."""

    def __init__(self, settings: Any):
        super().__init__(settings)
        tower, plain = self.tower, self.tower.stand_ins

        def again(module: Any, hidden: torch.Tensor) -> dict[str, Any]:
            added = torch.linspace(0.0, 1.0, hidden.shape[-1], dtype=torch.float64)  # a constant would not show
            return plain(module, hidden) | {"pos_embed": lambda indices: added.expand(*indices.shape, -1)}

        tower.stand_ins = again


FAULTS = [
    ("gradient of states lost", GradientOfStatesLost, lambda e: e.loss < 1e-9 < 0.1 < e.gradient),
    ("positions added again", PositionsAddedAgain, lambda e: 1e-6 < e.loss),
]


@pytest.mark.parametrize(("fault", "seen"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_a_planted_mistake_is_seen(fault: type, seen: Any, qwen3_vl_model: str) -> None:
    case = Case(ONE, ONE, 1, tower_stages=2)
    errors: Errors = compare(qwen3_vl_model, case, images_and_videos()[:1], Fault(vision=fault))
    assert seen(errors), errors


SCHEDULES = (("sequential", 1), ("gpipe", 1), ("1f1b", 1), ("interleaved", 2))
GRID = [
    pytest.param(
        Case(Degrees(data=data, tensor=tensor), Degrees(data=data, tensor=tensor), 4, tower_stages=tower,
             stages=stages, chunks=chunks, schedule=schedule, packing=(data + tensor + tower) % 2 == 0),
        model, id=f"{model}-{tower}+{stages}-tensor{tensor}-data{data}-{schedule}",
    )
    for tower, stages, tensor, data, (schedule, chunks), model in product(
        (1, 2, 4), (1, 2), (1, 2), (1, 2), SCHEDULES, ("windows", "deepstack")
    )
    if schedule != "interleaved" or stages == 2
]  # fmt: skip


@pytest.mark.grid
@pytest.mark.parametrize(("case", "model"), GRID)
def test_every_chain_equals_the_plain_model(
    case: Case, model: str, qwen3_vl_model: str, four_layers_model: str
) -> None:
    steps = images_and_videos() if model == "deepstack" else awkward_steps()
    assert_exact(compare(qwen3_vl_model if model == "deepstack" else four_layers_model, case, steps))
