"""Sharded equals plain where any two features of a layout meet: a table in which each pair is in some row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dhp.data.sample.sample import Sample
from dhp.models import lora as adapters
from tests.engine import test_deepstack, test_families
from tests.engine.pair_rows import MORE, QUICK, ROWS
from tests.engine.pairs import FEATURES, Row, apart, features_of, pairs_of, shown_by, wanted_pairs
from tests.engine.test_parity import assert_exact, assert_exact_in_single_precision
from tests.helpers.batches import awkward_steps
from tests.helpers.layouts import FIRST_OUT, Fault, InspectedText, InspectedVision, compare, compare_rounding
from tests.helpers.norms import exact_norms, use_exact_norms, use_exact_turns
from tests.helpers.rows import slow
from tests.helpers.tiny import save_llava, save_llava_with_experts, save_model, save_qwen3_vl

FOUR = {"num_hidden_layers": 4}  # so that there is something to cut into stages of two chunks
MODELS: dict[str, tuple[Callable[[Path], Path], Callable[[], list[list[Sample]]]]] = {
    "windows": (lambda folder: save_model(folder, text=FOUR), awkward_steps),
    "tied": (lambda folder: save_model(folder, tied=True, text=FOUR | {"num_key_value_heads": 2}), awkward_steps),
    "whole images": (lambda folder: save_llava(folder, **FOUR), test_families.steps),
    "deepstack": (save_qwen3_vl, test_deepstack.steps),
    "experts": (lambda folder: save_llava_with_experts(folder, **FOUR), test_families.steps),
}
_MADE: dict[str, tuple[str, Sequence[Sequence[Sample]]]] = {}


class _Exact:
    """On ranks, without the float32 of norms, routers and rotary positions of towers."""

    def __init__(self, settings: Any):
        use_exact_norms(setattr)
        use_exact_turns(setattr)
        super().__init__(settings)


class ExactVision(_Exact, InspectedVision):
    pass


class ExactText(_Exact, InspectedText):
    pass


@pytest.fixture
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The row's model and its steps, once a session."""
    name = request.getfixturevalue("row").model
    if name not in _MADE:
        save, steps = MODELS[name]
        _MADE[name] = str(save(tmp_path_factory.mktemp("pairs") / "model")), steps()
    return _MADE[name]


@pytest.mark.parametrize("row", [*QUICK, *map(slow, MORE)], ids=str)
def test_equals_the_plain_model(row: Row, made: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapters, "FIRST_OUT", FIRST_OUT)
    if row.case.dtype == "bfloat16":
        ratios = compare_rounding(made[0], row.case, made[1], together=row.model == "experts")
        assert max(ratios.loss, ratios.gradient, ratios.update) < 2.5, ratios
        return
    check = assert_exact if row.case.dtype == "float64" else assert_exact_in_single_precision
    use_exact_turns(monkeypatch.setattr)
    with exact_norms():
        check(compare(made[0], row.case, made[1], Fault(ExactVision, ExactText)))


def test_each_pair_of_features_is_in_a_row() -> None:
    met = set().union(*map(pairs_of, ROWS))
    missing = wanted_pairs() - met
    assert not missing, f"in no row: {sorted(' with '.join(sorted(pair)) for pair in missing)}"


def test_each_feature_is_in_a_quick_row() -> None:
    missing = set(FEATURES) - set().union(*map(shown_by, QUICK))
    assert not missing, f"in no quick row, which is what `make test` runs: {sorted(missing)}"


def test_no_row_has_a_pair_that_cannot_stand_together() -> None:
    for row in ROWS:
        wrong = [(pair, reason) for pair, reason in apart().items() if pair <= features_of(row)]
        assert not wrong, row
    assert set().union(*apart()) <= set(FEATURES)


def test_each_row_adds_a_pair() -> None:
    """Or it belongs behind `-m grid`."""
    for row in ROWS:
        others = set().union(*(pairs_of(other) for other in ROWS if other is not row))
        assert pairs_of(row) - others, f"{row} adds none"
