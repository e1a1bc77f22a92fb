"""Norms and residuals sharded over the sequence under tensor parallelism equal the plain model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from dhp.core.axes import Degrees
from dhp.parallel.tensor.styles import PARTIAL_OVER
from tests.engine import test_deepstack
from tests.engine.test_parity import assert_exact
from tests.helpers.batches import awkward_steps
from tests.helpers.layouts import Case, Fault, InspectedText, InspectedVision, compare
from tests.helpers.rows import on_demand, slow_but

ONE, TWO = Degrees(), Degrees(tensor=2)
CASES = [
    Case(ONE, TWO, 2, sharded_norms=True),
    Case(ONE, TWO, 4, sharded_norms=True, stages=2, schedule="1f1b", packing=True, recompute="mlp:0,all:1-3"),
    Case(ONE, TWO, 2, sharded_norms=True, mlp_chunks=3),
    on_demand(Case(ONE, TWO, 4, sharded_norms=True, stages=2, chunks=2, schedule="interleaved", recompute="light")),
    on_demand(Case(ONE, Degrees(tensor=4), 2, sharded_norms=True, recompute="linear")),
    on_demand(Case(Degrees(data=2), Degrees(ulysses=2, tensor=2), 2, sharded_norms=True, packing=True)),
    on_demand(Case(TWO, TWO, 2, sharded_norms=True, tower_stages=2, stages=2, schedule="gpipe")),
]


@pytest.mark.parametrize("case", slow_but(CASES, CASES[0], CASES[2]), ids=str)
def test_equals_the_plain_model(case: Case, four_layers_model: str) -> None:
    assert_exact(compare(four_layers_model, case, awkward_steps()))


DEEPSTACK = [Case(TWO, TWO, 2, sharded_norms=True), on_demand(replace(CASES[1], vision=TWO, tower_stages=2))]


@pytest.mark.parametrize("case", DEEPSTACK, ids=str)
def test_features_enter_between_layers(case: Case, qwen3_vl_model: str) -> None:
    assert_exact(compare(qwen3_vl_model, case, test_deepstack.steps()))


class OwnTokensAlone(InspectedText):
    """Gradients of norms are left as each rank's own tokens give them."""

    def load_slice(self) -> Any:
        model = super().load_slice()
        for module in model.modules():
            if not isinstance(module, nn.Linear):
                module.__dict__.pop(PARTIAL_OVER, None)
        return model


def test_norms_that_are_not_summed_are_caught(four_layers_model: str) -> None:
    errors = compare(four_layers_model, CASES[0], awkward_steps(), Fault(InspectedVision, OwnTokensAlone))
    assert errors.gradient > 0.1 and "norm" in errors.gradient_name
