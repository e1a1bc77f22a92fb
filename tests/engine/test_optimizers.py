"""Optimizers, and stages of towers, in layouts."""

from itertools import product
from typing import Any

import pytest
import torch

from dhp.core.axes import Degrees
from dhp.core.batch import Bundle
from dhp.core.parameters import AdapterSettings, GroupRule, Selector
from dhp.engine.stage_settings import StageSettings
from tests.engine.test_families import steps as images_and_videos
from tests.helpers.alike import assert_exact
from tests.helpers.batches import awkward_steps
from tests.helpers.layouts import Case, Errors, Fault, InspectedText, InspectedVision, compare
from tests.helpers.rows import slow

ONE = Degrees()
GROUPS = (GroupRule("fast", (Selector("layers.1"),), learning_rate=3e-3, weight_decay=0.0),)
ADAPTERS = (("text", AdapterSettings(3, 3.0)),)

MUON = [
    Case(Degrees(ulysses=2), Degrees(tensor=2), optimizer="muon"),
    slow(
        Case(
            Degrees(data=2, tensor=2), Degrees(data=3), 2, zero_stage=2, text_zero_stage=3, fsdp=True, optimizer="muon"
        )
    ),
]


def assert_equal(errors: Errors) -> None:
    assert_exact(errors)
    assert errors.update < 1e-9, errors


@pytest.mark.parametrize("case", MUON, ids=str)
def test_muon_equals_torchs_own(case: Case, made_model: str) -> None:
    assert_equal(compare(made_model, case, awkward_steps()))


ADAFACTOR = [Case(Degrees(ulysses=2), Degrees(tensor=2), optimizer="adafactor")]


@pytest.mark.parametrize("case", ADAFACTOR, ids=str)
def test_adafactor_equals_transformers(case: Case, made_model: str) -> None:
    assert_equal(compare(made_model, case, awkward_steps()))


@pytest.mark.grid
def test_muon_of_a_head_that_is_the_embedding(few_keys_model: str) -> None:
    """Tied over two stages, with fewer key heads than ranks."""
    case = Case(ONE, Degrees(tensor=2), stages=2, schedule="1f1b", optimizer="muon")
    assert_equal(compare(few_keys_model, case, awkward_steps()))


class Alone(InspectedText):
    """Orthogonalizes what it holds of each matrix by itself."""

    def __init__(self, settings: StageSettings):
        super().__init__(settings)
        self.optimizer.optimizer.shared.clear()


def test_a_mistake_shows(made_model: str) -> None:
    case = Case(ONE, Degrees(tensor=2), optimizer="muon")
    errors = compare(made_model, case, awkward_steps(), Fault(text=Alone))
    assert errors.update > 0.05 and "language_model.layers" in errors.update_name, errors


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
