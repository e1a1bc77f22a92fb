"""Qwen3-VL in layouts: features of several tower layers enter the decoder's layers, wherever these lie.

They cross the edges as named tensors of one bundle, some to the first stage and some to later ones.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from dhp.core.axes import Degrees
from dhp.core.batch import Bundle
from dhp.data.sample.sample import Sample
from tests.engine.test_parity import assert_exact
from tests.helpers.layouts import Case, Fault, InspectedText, InspectedVision, compare
from tests.helpers.norms import exact_norms, use_exact_norms
from tests.helpers.rows import on_demand, slow
from tests.helpers.tiny import IMAGE_TOKEN, make_sample

ONE = Degrees()
CASES = [
    Case(ONE, ONE, 2, stages=2, schedule="1f1b"),
    on_demand(Case(Degrees(ulysses=2), Degrees(tensor=2), 2, packing=True)),
    on_demand(Case(Degrees(ring=2, ulysses=2), ONE, 1, packing=True, checkpointing=True)),
    slow(Case(ONE, ONE, 2, packing=True, stages=4, schedule="1f1b")),  # a feature a stage
    on_demand(Case(Degrees(data=2), Degrees(data=2), 2, packing=True, stages=4, schedule="1f1b")),
    on_demand(Case(Degrees(ulysses=2), Degrees(tensor=2), 4, packing=True, stages=2, chunks=2, schedule="interleaved")),
    on_demand(Case(Degrees(tensor=2), Degrees(data=2, tensor=2), 2, stages=2, schedule="gpipe", checkpointing=True)),
    on_demand(Case(ONE, Degrees(data=2), 2, packing=True, stages=2, schedule="1f1b", text_zero_stage=3, fsdp=True)),
    on_demand(Case(Degrees(ulysses=2), Degrees(ring=2, ulysses=2), 2, stages=2, schedule="1f1b")),
    on_demand(Case(Degrees(data=2), ONE, 2, frozen=("vision",), stages=2, schedule="1f1b")),
    Case(Degrees(data=2), ONE, 2, frozen=("vision", "projector"), packing=True),
]


def _make(grids: list[tuple[int, int, int]], seed: int, seconds: tuple = ()) -> Sample:
    return make_sample(grids, 5 + seed, 3, seed, IMAGE_TOKEN, seconds=seconds, stamped=True)


@cache
def steps() -> list[list[Sample]]:
    """An image; two of unequal sizes; a video beside an image; text alone. Then a large image, then no image at all."""
    mixed = [
        _make([(1, 4, 6)], 1),
        _make([(1, 4, 6), (1, 8, 2)], 2),
        _make([(1, 4, 4), (2, 4, 6)], 3, (None, 1.0)),
        _make([], 4),
    ]
    return [
        mixed,
        [_make([(1, 12, 10)], 5), *(_make([], seed) for seed in (6, 7, 8))],
        [_make([], n) for n in range(4)],
    ]


class ExactText(InspectedText):
    def __init__(self, settings: Any):
        use_exact_norms(setattr)
        super().__init__(settings)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_equals_the_plain_model(case: Case, qwen3_vl_model: str) -> None:
    with exact_norms():
        assert_exact(compare(qwen3_vl_model, case, steps(), Fault(text=ExactText)))


class FeatureDropped(InspectedVision):
    """The last feature never leaves."""

    def forward_step(self, *given: Any) -> tuple[Bundle, ...]:
        return tuple(_changed(b, "deepstack.2", torch.zeros_like) for b in super().forward_step(*given))


class FeaturesOfImagesExchanged(InspectedVision):
    """The first feature's rows come in another order: those of two images that lie side by side."""

    def forward_step(self, *given: Any) -> tuple[Bundle, ...]:
        return tuple(_changed(b, "deepstack.0", lambda rows: rows.roll(6, 0)) for b in super().forward_step(*given))


class GradientLost(ExactText):
    """The gradient of a feature that enters the second stage goes no further."""

    def backward_step(self, *given: Any) -> tuple[Bundle, ...]:
        return tuple(_changed(b, "deepstack.2", torch.zeros_like) for b in super().backward_step(*given))


def _changed(bundle: Bundle, name: str, change: Any) -> Bundle:
    tensors = dict(bundle.tensors)
    if name in tensors:
        tensors[name] = change(tensors[name])
    return Bundle(tensors)


@pytest.mark.parametrize(
    ("fault", "loss"),
    [
        (Fault(FeatureDropped, ExactText), True),
        (Fault(FeaturesOfImagesExchanged, ExactText), True),
        (Fault(text=GradientLost), False),
    ],
    ids=["feature dropped", "features exchanged", "gradient lost"],
)
def test_a_planted_mistake_is_seen(fault: Fault, loss: bool, qwen3_vl_model: str) -> None:
    with exact_norms():
        errors = compare(qwen3_vl_model, CASES[0], steps()[:1], fault)
    assert (errors.loss > 1e-7) == loss and errors.gradient > 1e-3, errors
