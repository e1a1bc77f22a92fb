"""Other model families through the same layouts: sharded equals plain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from dhp.core.axes import Degrees
from dhp.data.sample.sample import Sample
from tests.engine.test_parity import assert_exact, assert_exact_in_single_precision
from tests.helpers.layouts import Case, Fault, InspectedText, compare, compare_rounding
from tests.helpers.rows import on_demand, slow
from tests.helpers.tiny import IMAGE_TOKEN, make_sample

ONE = Degrees()
IMAGE = (1, 4, 4)

LLAVA = [
    Case(ONE, ONE),
    on_demand(
        Case(Degrees(ulysses=2), Degrees(tensor=2), micro_batches=1)
    ),  # images shared by the ranks of a "sequence"
    on_demand(Case(Degrees(ulysses=4), Degrees(data=2), micro_batches=1, packing=True)),
    on_demand(Case(Degrees(ring=2, ulysses=2), Degrees(tensor=4), 3, packing=True, checkpointing=True)),
    on_demand(Case(Degrees(data=2, tensor=2), Degrees(data=2, tensor=2))),
    on_demand(Case(Degrees(ulysses=2), Degrees(tensor=2), dtype="float32", zero_stage=1)),
    on_demand(Case(Degrees(data=2), Degrees(data=2), dtype="float32", zero_stage=3, text_zero_stage=3, packing=True)),
]


def make(images: int, tokens: int, targets: int, seed: int) -> Sample:
    return make_sample([IMAGE] * images, tokens, targets, seed, IMAGE_TOKEN, unit=1, values=3 * 14 * 14)


def steps() -> list[list[Sample]]:
    """Images in uneven numbers, several in a sample, none at all, fewer than ranks."""
    return [
        [make(1, 5, 3, 1), make(3, 9, 8, 2), make(0, 6, 1, 3), make(1, 4, 2, 4)],
        [make(0, n, n - 2, 10 + n) for n in (5, 9, 4, 7)],
        [make(0, 8, 5, 21), make(1, 5, 4, 22), make(0, 6, 3, 23), make(0, 4, 1, 24)],
    ]


@pytest.mark.parametrize("case", LLAVA, ids=str)
def test_llava_equals_the_plain_model(case: Case, llava_model: str) -> None:
    check = assert_exact if case.dtype == "float64" else assert_exact_in_single_precision
    check(compare(llava_model, case, steps()))


HEAD_NORMS = [
    Case(ONE, Degrees(tensor=2), micro_batches=2),  # with one micro-batch, summing sums again would not show
    on_demand(Case(ONE, Degrees(data=2, tensor=4), micro_batches=2, packing=True, checkpointing=True)),
    slow(
        Case(ONE, Degrees(tensor=8), micro_batches=3)
    ),  # ranks share key heads, and so parts of the gradient of their norm
]


def _norm(self: Qwen3RMSNorm, states: Tensor) -> Tensor:
    """Qwen3's norm without its detour through float32, whose rounding jumps by 1e-7 for a difference of 1e-16."""
    return self.weight * (states * torch.rsqrt(states.square().mean(-1, keepdim=True) + self.variance_epsilon))


class ExactNorms(InspectedText):
    def __init__(self, settings: Any):
        Qwen3RMSNorm.forward = _norm
        super().__init__(settings)


@pytest.mark.parametrize("case", HEAD_NORMS, ids=str)
def test_norms_of_heads_get_the_gradient_of_all_heads(
    case: Case, head_norms_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Qwen3RMSNorm, "forward", _norm)
    assert_exact(compare(head_norms_model, case, steps(), Fault(text=ExactNorms)))


@pytest.mark.slow
def test_norms_of_heads_in_bfloat16(head_norms_model: str) -> None:
    case = Case(ONE, Degrees(tensor=2), 3, dtype="bfloat16", packing=True)
    ratios = compare_rounding(head_norms_model, case, steps())
    assert max(ratios.loss, ratios.gradient, ratios.update) < 2.5, ratios
