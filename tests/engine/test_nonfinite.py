"""A step whose loss or gradient is not finite leaves everything as it was, in every layout: the run goes on as one that
never had the step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dhp.core.axes import Degrees
from dhp.core.batch import StepData
from dhp.engine import text_engine
from dhp.engine.sample_losses import breaking
from tests.helpers.batches import mixed_step
from tests.helpers.layouts import Case, Fault, InspectedText, Running, _slotted, make_sharder
from tests.helpers.rows import slow_but

ONE, TWO = Degrees(), Degrees(data=2)


class OneReplicasLossIsInfinite(InspectedText):
    """In the second step the first replica's loss is infinite, as where the target's logit is; no gradient is."""

    def forward_step(self, micro_batch: int, chunk: int, work: Any, *received: Any) -> Any:
        self._number = micro_batch
        return super().forward_step(micro_batch, chunk, work, *received)

    def _share(self, *arguments: Any) -> Tensor:
        share = super()._share(*arguments)
        broken = len(self.counted) == 1 and self.rank < self.spec.degrees.tensor and self._number == 0
        return share + math.inf if broken else share

    def optimizer_step(self, info: Any, *norms_sq: float) -> Any:
        self.counted.append(info.step)
        return super().optimizer_step(info, *norms_sq)

    def __init__(self, settings: Any):
        self.counted: list[int] = []
        super().__init__(settings)


class Unnoticed(OneReplicasLossIsInfinite):
    """The same, where nothing passes the loss on."""

    def __init__(self, settings: Any):
        text_engine.breaking = lambda loss: loss
        super().__init__(settings)


@dataclass(frozen=True)
class Outcome:
    """losses and finite, step by step; weights by stage and rank; states: all tensors of the optimizers' files."""

    losses: list[float]
    finite: list[set[bool]]
    weights: list[list[dict[str, Tensor]]]
    states: dict[str, Tensor]


def train(
    model: str, case: Case, steps: list[int], folder: Path, fault: Fault, edit: Callable[[StepData, int], StepData]
) -> Outcome:
    dealer, losses, finite = make_sharder(model, case), [], []
    with Running(model, case, fault) as running:
        for step in steps:
            loss, reports = running.step(edit(dealer.shard(_slotted(step, case, mixed_step())), step))
            losses.append(loss)
            finite.append({one.finite for of_stage in reports.values() for one in of_stage})
        weights = running.weights()
        running.save(folder)
    found = {
        f"{path.relative_to(folder)} {name}": tensor
        for path in sorted(folder.glob("*/optimizer/*.safetensors"))
        for name, tensor in load_file(path).items()
    }
    return Outcome(losses, finite, weights, found)


def as_it_is(data: StepData, step: int) -> StepData:
    return data


def with_a_broken_picture(data: StepData, step: int) -> StepData:
    """In the second step, a pixel of the last shard that has any is not a number."""
    if step != 1:
        return data
    rows = [list(row) for row in data.work["vision"]]
    at, shard = max((m, s) for m, row in enumerate(rows) for s, one in enumerate(row) if sum(one.rows))
    pixels = rows[at][shard].pixels.clone()
    pixels[0, 0] = math.nan
    rows[at][shard] = replace(rows[at][shard], pixels=pixels)
    return replace(data, work={**data.work, "vision": tuple(map(tuple, rows))})


def assert_same_bits(found: Outcome, expected: Outcome) -> None:
    assert found.states.keys() == expected.states.keys() and found.states
    for name, tensor in found.states.items():
        assert torch.equal(tensor, expected.states[name]), name
    for of_stage, wanted in zip(found.weights, expected.weights, strict=True):
        for of_rank, own in zip(of_stage, wanted, strict=True):
            assert all(torch.equal(tensor, own[name]) for name, tensor in of_rank.items())


CASES = [
    Case(TWO, Degrees(data=2, tensor=2), dtype="float32"),
    Case(TWO, TWO, dtype="float32", zero_stage=1, text_zero_stage=1),
    Case(TWO, TWO, dtype="float32", zero_stage=3, text_zero_stage=3),
    Case(TWO, TWO, dtype="bfloat16", zero_stage=2, text_zero_stage=2),
    Case(TWO, TWO, dtype="float32", zero_stage=2, text_zero_stage=2, fsdp=True),
    Case(TWO, Degrees(data=2, tensor=2), dtype="bfloat16", zero_stage=3, text_zero_stage=3, fsdp=True),
    Case(ONE, ONE, dtype="float32", schedule="1f1b", stages=2),
    Case(Degrees(ulysses=2), TWO, dtype="bfloat16", packing=True),
]


BROKEN = [*product(CASES, ["a gradient", "a loss alone"])]
QUICK = [(CASES[4], "a gradient"), (CASES[6], "a loss alone")]


@pytest.mark.parametrize(("case", "broken"), slow_but(BROKEN, *QUICK), ids=str)
def test_the_step_leaves_no_trace_in_weights_or_moments(
    case: Case, broken: str, made_model: str, tmp_path: Path
) -> None:
    edit = with_a_broken_picture if broken == "a gradient" else as_it_is
    fault = Fault() if broken == "a gradient" else Fault(text=OneReplicasLossIsInfinite)
    found = train(made_model, case, [0, 1, 2], tmp_path / "found", fault, edit)
    expected = train(made_model, case, [0, 2], tmp_path / "expected", Fault(), as_it_is)
    assert found.finite == [{True}, {False}, {True}]
    assert not math.isfinite(found.losses[1])
    assert [found.losses[0], found.losses[2]] == expected.losses
    assert_same_bits(found, expected)


def test_a_step_that_is_taken_does_leave_one(made_model: str, tmp_path: Path) -> None:
    found = train(made_model, CASES[0], [0, 1, 2], tmp_path / "found", Fault(), as_it_is)
    expected = train(made_model, CASES[0], [0, 2], tmp_path / "expected", Fault(), as_it_is)
    assert found.finite == [{True}] * 3
    with pytest.raises(AssertionError):
        assert_same_bits(found, expected)


def test_an_infinite_loss_that_gradients_do_not_show_is_taken_where_nothing_passes_it_on(
    made_model: str, tmp_path: Path
) -> None:
    found = train(made_model, CASES[0], [0, 1], tmp_path, Fault(text=Unnoticed), as_it_is)
    assert found.losses[1] == math.inf and found.finite == [{True}, {True}]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_finite_loss_keeps_its_bits_and_its_gradients(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(50, dtype=dtype, requires_grad=True)
    for value in (inputs.square().sum(), -inputs.sum() * 1e-30, inputs.sum() * 1e30):
        own = torch.autograd.grad(value, inputs, retain_graph=True)[0]
        passed_on = breaking(value)
        assert torch.equal(passed_on, value)
        assert torch.equal(torch.autograd.grad(passed_on, inputs)[0], own)


@pytest.mark.parametrize("broken", [math.inf, -math.inf, math.nan])
def test_a_loss_that_is_no_number_breaks_finite_gradients(broken: float) -> None:
    inputs = torch.ones(3, requires_grad=True)
    value = inputs.sum() + broken
    assert torch.autograd.grad(value, inputs, retain_graph=True)[0].isfinite().all()
    assert torch.autograd.grad(breaking(value), inputs)[0].isnan().all()
