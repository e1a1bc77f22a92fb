"""Which sample had which loss, by hand."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dhp.core.axes import Degrees
from dhp.core.reports import SampleLosses, StageReport
from dhp.trainer.step_reports import mean_losses
from tests.trainer.test_step_reports import INFO

# Two replicas of two sequence ranks with two tensor ranks each, behind a stage without a head.
STAGES: Any = {
    "vision": SimpleNamespace(leaders=list, spec=SimpleNamespace(degrees=Degrees(ulysses=2))),
    "text": SimpleNamespace(
        leaders=lambda of: list(of[::2]), spec=SimpleNamespace(degrees=Degrees(data=2, ring=2, tensor=2))
    ),
}
ORDER = (((("b", 7), ("a", 3)), (("a", 1),)), ((("a", 9),), ()))  # [micro-batch][replica]
STEP = replace(INFO, order=ORDER, rows={"a": (1, 3, 5, 9), "b": (7,)})


def report(samples: SampleLosses | None) -> StageReport:
    return StageReport(0, None, 1.0, {}, None, {}, samples=samples)


def of_ranks(*leaders: SampleLosses | None) -> dict[str, list[StageReport]]:
    return {"vision": [report(None)] * 2, "text": [report(one) for each in leaders for one in (each, None)]}


FOUR = (
    SampleLosses({0: (1.0, 2.0), 1: (0.0,)}, {0: (1, 2), 1: (0,)}),
    SampleLosses({0: (3.0, 0.0), 1: (0.0,)}, {0: (3, 0), 1: (0,)}),
    SampleLosses({0: (5.0,), 1: ()}, {0: (1,), 1: ()}),
    SampleLosses({0: (7.0,), 1: ()}, {0: (2,), 1: ()}),
)


def test_parts_of_a_sample_are_put_together_and_stand_beside_their_rows() -> None:
    """Row 9 has no target, row 5 was left out."""
    assert mean_losses(STEP, of_ranks(*FOUR), STAGES) == {"a": [4.0, 1.0, None, None], "b": [1.0]}


def test_of_a_row_that_comes_twice_each_has_the_mean() -> None:
    twice = replace(STEP, order=(((("b", 7), ("a", 1)), (("a", 1),)), ORDER[1]), rows={"a": (1, 1, 9), "b": (7,)})
    assert mean_losses(twice, of_ranks(*FOUR), STAGES) == {"a": [2.8, 2.8, None], "b": [1.0]}


def test_nothing_is_said_where_no_rank_reports_any() -> None:
    assert mean_losses(STEP, of_ranks(*[None] * 4), STAGES) == {}


def test_ranks_that_have_other_samples_than_were_dealt_are_seen() -> None:
    short = replace(FOUR[0], sums={0: (1.0,), 1: (0.0,)})
    with pytest.raises(ValueError, match="zip"):
        mean_losses(STEP, of_ranks(short, *FOUR[1:]), STAGES)
