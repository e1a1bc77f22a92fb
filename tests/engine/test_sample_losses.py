"""The loss of each sample equals the plain model's, however samples are laid out over ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from dhp.core.axes import Degrees
from dhp.core.batch import IGNORED, StepInfo, TextInput
from dhp.core.reports import SampleLosses
from dhp.data.sample.sample import Sample
from dhp.engine.sample_losses import SampleLossKeeper
from dhp.objectives.objective import CrossEntropy
from dhp.trainer.step_reports import mean_losses
from tests.helpers.batches import mixed_step, step_with_one_window, step_without_target
from tests.helpers.layouts import UPDATE, Case, Running, _slotted, make_sharder
from tests.helpers.oracle import Oracle
from tests.helpers.rows import on_demand

ONE = Degrees()
DOUBLE = [
    Case(ONE, ONE),
    Case(ONE, ONE, packing=True),
    on_demand(Case(ONE, ONE, 1, checkpointing=True)),
    Case(Degrees(data=2), Degrees(tensor=2), 3),
    on_demand(Case(ONE, Degrees(tensor=2), packing=True, sharded_norms=True)),
    Case(ONE, Degrees(ring=2), 1),
    on_demand(Case(ONE, Degrees(ulysses=2))),
    Case(ONE, Degrees(data=2, ulysses=2), 2, sequence_groups="auto"),
    Case(ONE, Degrees(data=2)),
    Case(ONE, ONE, 4, stages=2, chunks=2, schedule="interleaved"),
    on_demand(Case(ONE, Degrees(data=2, tensor=2), 4, stages=2, schedule="1f1b", packing=True)),
    on_demand(Case(ONE, Degrees(data=2, tensor=2), text_zero_stage=3, fsdp=True)),
]
SINGLE = [
    Case(ONE, Degrees(data=2), 2, "float32", text_zero_stage=2, packing=True),
    on_demand(Case(ONE, Degrees(data=3), 1, "float32", text_zero_stage=3)),
]


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
    keeper, no = SampleLossKeeper(CrossEntropy(), 1), IGNORED
    padded = keeper.room(0, row([[5, no, no], [no, 6, 7]], None, (2, 3)))
    packed = keeper.room(1, row([[no, no, 4]], (1, 2), (1, 2)))
    # Two parts of sample 2, then a token of a segment that is no sample.
    shared = keeper.room(2, row([[3, 4, no]], (2, 2, 4, 1), (2, 2, 4), shards=((), ((2, 0, 1), (2, 3, 1), (3, 0, 1)))))
    assert padded is not None and packed is not None and shared is not None
    padded += [torch.tensor([1.0]), torch.tensor([2.0, 4.0])]
    packed += [torch.tensor([8.0])]
    shared += [torch.tensor([16.0, 32.0])]
    keeper.send()
    assert keeper.take() == SampleLosses(
        {0: (1.0, 6.0), 1: (0.0, 8.0), 2: (0.0, 0.0, 48.0)}, {0: (1, 2), 1: (0, 1), 2: (0, 0, 2)}
    )
    keeper.send()
    assert keeper.take() is None


def test_a_forward_that_is_repeated_counts_once() -> None:
    keeper = SampleLossKeeper(CrossEntropy(), 0)
    for loss in (1.0, 2.0):
        room = keeper.room(0, row([[5]], None, (1,)))
        assert room is not None
        room.append(torch.tensor([loss]))
    keeper.send()
    assert keeper.take() == SampleLosses({0: (2.0,)}, {0: (1,)})


def test_a_row_without_samples_has_no_losses() -> None:
    keeper = SampleLossKeeper(CrossEntropy(), 0)
    assert keeper.room(0, row([[IGNORED]], (1,), ())) == []
    assert keeper.room(1, row([[]], (2,), (2,), shards=((), ((0, 0, 2),)))) == []  # others have all of the row
    keeper.send()
    assert keeper.take() == SampleLosses({0: (), 1: (0.0,)}, {0: (), 1: (0,)})


def test_an_objective_without_losses_by_sample_reports_none() -> None:
    class Whole(CrossEntropy):
        def counted(self, columns: Mapping[str, Tensor]) -> Tensor | None:
            return None

    keeper = SampleLossKeeper(Whole(), 0)
    assert keeper.room(0, row([[5]], None, (1,))) is None and keeper.take() is None
