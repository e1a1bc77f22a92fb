"""Optimizers whose step needs whole matrices: every layout takes the steps of the library's own in one process."""

from __future__ import annotations

import pytest

from dhp.core.axes import Degrees
from dhp.core.parameters import AdapterSettings, GroupRule, Selector
from dhp.engine.stage_settings import StageSettings
from tests.helpers.alike import assert_exact
from tests.helpers.batches import awkward_steps
from tests.helpers.layouts import Case, Errors, Fault, InspectedText, compare
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
