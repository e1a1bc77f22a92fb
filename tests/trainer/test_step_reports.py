"""What ranks report of a step, as one line of it."""

from types import SimpleNamespace
from typing import Any

import pytest

from dhp.core.axes import Degrees
from dhp.core.reports import StageReport
from dhp.trainer.step_reports import expert_loads


def report(rank: int, **rows: tuple[int, ...]) -> StageReport:
    named = {layer.removeprefix("l"): of for layer, of in rows.items()}
    return StageReport(rank, None, 0.0, {}, None, {}, expert_rows=named)


def stage(degrees: Degrees) -> Any:
    return SimpleNamespace(spec=SimpleNamespace(degrees=degrees))


def test_rows_of_experts_are_summed_over_ranks_and_compared_with_the_mean() -> None:
    """Two replicas that share four experts out: the first has those numbered 0 and 1."""
    shared = {"text.0": stage(Degrees(data=2, expert=2)), "text.1": stage(Degrees(data=2, expert=2))}
    reports = {
        "text.0": [report(0, l0=(4, 2, 1, 1)), report(1, l0=(4, 0, 2, 2))],
        "text.1": [report(0, l1=(1, 1, 1, 1)), report(1, l1=(2, 2, 2, 2))],
    }
    found = expert_loads(reports, shared)
    assert found == {"hottest": {"0": 8 / 4, "1": 1.0}, "busiest": {"0": 10 / 8, "1": 1.0}}
    alone = {name: stage(Degrees(data=2)) for name in shared}
    assert expert_loads(reports, alone) == {"hottest": {"0": 2.0, "1": 1.0}}  # all ranks have all of them


@pytest.mark.parametrize("rows", [{}, {"l0": (0, 0)}])
def test_without_rows_there_is_nothing_to_compare(rows: dict[str, tuple[int, ...]]) -> None:
    found = expert_loads({"text": [report(0, **rows)]}, {"text": stage(Degrees())})
    assert found == ({"hottest": {"0": 0.0}} if rows else None)
