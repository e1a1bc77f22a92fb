"""Losses of samples, and steps that are not finite."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dhp.core.axes import Degrees
from dhp.core.batch import IGNORED, StepData, StepInfo, TextInput
from dhp.core.reports import SampleSums
from dhp.data.sample.sample import Sample
from dhp.engine import text_engine
from dhp.engine.sample_sums import SampleSumKeeper, breaking
from dhp.objectives.objective import CrossEntropy
from dhp.trainer.step_reports import mean_losses
from tests.helpers.batches import mixed_step, step_with_one_window, step_without_target
from tests.helpers.layouts import UPDATE, Case, Fault, InspectedText, Running, _slotted, make_sharder
from tests.helpers.oracle import Oracle
from tests.helpers.rows import slow_but

ONE = Degrees()
DOUBLE = [
    Case(ONE, ONE),
    Case(ONE, ONE, packing=True),
    Case(Degrees(data=2), Degrees(tensor=2), 3),
    Case(ONE, Degrees(ring=2), 1),
    Case(ONE, Degrees(data=2, ulysses=2), 2, sequence_groups="auto"),
    Case(ONE, Degrees(data=2)),
    Case(ONE, ONE, 4, stages=2, chunks=2, schedule="interleaved"),
]
SINGLE = [Case(ONE, Degrees(data=2), 2, "float32", text_zero_stage=2, packing=True)]


def samples() -> list[Sample]:
    """Two of them without a target."""
    every = [*mixed_step(), *step_without_target()[:2], *step_with_one_window()]
    return [replace(sample, position=number) for number, sample in enumerate(every, 1)]


def measure(model: str, case: Case) -> tuple[float, StepInfo, dict[str, Any], Any]:
    """A step's loss, its counts, and what its ranks report; what was evaluated before is in none of it."""
    data = make_sharder(model, case).shard(_slotted(0, case, samples()))
    with Running(model, case) as running:
        running.evaluate(data)
        loss, reports = running.step(data)
    rows = {"made": tuple(range(len(samples())))}
    return loss, replace(data.info, rows=rows), reports, running.stages


def plain(model: str, dtype: str) -> list[float | None]:
    """Each sample alone in the plain model."""
    oracle = Oracle(model, getattr(torch, dtype), UPDATE)
    with torch.no_grad():
        sums = [float(oracle._loss_sum(sample)) for sample in samples()]
    return [each / one.target_tokens if one.target_tokens else None for each, one in zip(sums, samples(), strict=True)]


@pytest.mark.parametrize("case", [*DOUBLE, *SINGLE], ids=str)
def test_equals_each_sample_alone(case: Case, four_layers_model: str) -> None:
    loss, info, reports, stages = measure(four_layers_model, case)
    limit = 1e-9 if case.dtype == "float64" else 1e-5
    (found,) = mean_losses(info, reports, stages).values()
    expected = plain(four_layers_model, case.dtype)
    assert [one is None for one in found] == [one is None for one in expected] and found.count(None) == 2
    assert [one or 0.0 for one in found] == pytest.approx([one or 0.0 for one in expected], rel=limit)
    weighted = sum((one or 0.0) * sample.target_tokens for one, sample in zip(found, samples(), strict=True))
    assert weighted / info.target_tokens == pytest.approx(loss, rel=limit)
    silent = [one for name, of in reports.items() for one in of if one not in stages[name].leaders(of)]
    assert all(one.samples is None for one in silent)  # tensor ranks have the same, and it would count twice


def test_samples_in_another_order_are_seen(four_layers_model: str) -> None:
    _, info, reports, stages = measure(four_layers_model, DOUBLE[0])
    turned = replace(info, order=tuple(tuple(row[::-1] for row in rows) for rows in info.order))
    (found,) = mean_losses(turned, reports, stages).values()
    expected = plain(four_layers_model, "float64")
    pairs = zip(found, expected, strict=True)
    assert sum(abs((ours or 0.0) - (wanted or 0.0)) > 1e-2 for ours, wanted in pairs) > 4


def row(targets: list[list[int]], lengths: tuple[int, ...] | None, sizes: tuple[int, ...], **more: Any) -> TextInput:
    columns = {"targets": torch.tensor(targets)}
    return TextInput(columns | {"input_ids": columns["targets"]}, lengths, {}, 1.0, sizes, **more)


def test_sums_by_hand() -> None:
    keeper, no = SampleSumKeeper(CrossEntropy(), 1), IGNORED
    padded = keeper.room(0, row([[5, no, no], [no, 6, 7]], None, (2, 3)))
    packed = keeper.room(1, row([[no, no, 4]], (1, 2), (1, 2)))
    # Two parts of sample 2, then a token of a segment that is no sample.
    shared = keeper.room(2, row([[3, 4, no]], (2, 2, 4, 1), (2, 2, 4), shards=((), ((2, 0, 1), (2, 3, 1), (3, 0, 1)))))
    assert padded is not None and packed is not None and shared is not None
    padded += [torch.tensor([1.0]), torch.tensor([2.0, 4.0])]
    packed += [torch.tensor([8.0])]
    shared += [torch.tensor([16.0, 32.0])]
    keeper.send()
    assert keeper.take() == SampleSums(
        {0: (1.0, 6.0), 1: (0.0, 8.0), 2: (0.0, 0.0, 48.0)}, {0: (1, 2), 1: (0, 1), 2: (0, 0, 2)}
    )
    keeper.send()
    assert keeper.take() is None


def test_a_forward_that_is_repeated_counts_once() -> None:
    keeper = SampleSumKeeper(CrossEntropy(), 0)
    for loss in (1.0, 2.0):
        room = keeper.room(0, row([[5]], None, (1,)))
        assert room is not None
        room.append(torch.tensor([loss]))
    keeper.send()
    assert keeper.take() == SampleSums({0: (2.0,)}, {0: (1,)})


def test_a_row_without_samples_has_no_losses() -> None:
    keeper = SampleSumKeeper(CrossEntropy(), 0)
    assert keeper.room(0, row([[IGNORED]], (1,), ())) == []
    assert keeper.room(1, row([[]], (2,), (2,), shards=((), ((0, 0, 2),)))) == []  # others have all of the row
    keeper.send()
    assert keeper.take() == SampleSums({0: (), 1: (0.0,)}, {0: (), 1: (0,)})


def test_an_objective_without_losses_by_sample_reports_none() -> None:
    class Whole(CrossEntropy):
        def counted(self, columns: Mapping[str, Tensor]) -> Tensor | None:
            return None

    keeper = SampleSumKeeper(Whole(), 0)
    assert keeper.room(0, row([[5]], None, (1,))) is None and keeper.take() is None


ONE_RANK, TWO = Degrees(), Degrees(data=2)


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
    Case(ONE_RANK, ONE_RANK, dtype="float32", schedule="1f1b", stages=2),
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
