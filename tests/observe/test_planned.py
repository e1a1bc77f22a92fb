"""A plan beside what a run takes: the ratio, and the kind of cost that differs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dhp.observe.metrics import StepMetrics
from dhp.observe.planned import COMPUTING, READING, SENDING, WAITING, Planned, PlanVersusRun

PLANNED = Planned(
    step_s=1.0,
    busy_s={"vision": 0.3, "text": 0.6},
    comm_s={"vision": 0.05, "text": 0.2},
    tokens=1000,
    memory_bytes={"vision": 100, "text": 200},
)


def after(planned: Planned = PLANNED, **changed: object) -> PlanVersusRun:
    beside = PlanVersusRun(planned)
    taken = {"step_s": 1.0, "data_s": 0.0, "busy_s": {"vision": 0.3, "text": 0.6}, **changed}
    taken.setdefault("comm_s", {"vision": 0.05, "text": 0.2})
    beside.add(StepMetrics(step=1, step_s=9.0))  # a first step warms up
    for step in range(2, 5):
        beside.add(StepMetrics(step=step, **taken))  # type: ignore[arg-type]
    return beside


def test_a_run_as_planned() -> None:
    beside = after()
    assert beside.ratio == 1.0 and beside.differing() is None
    assert beside.line() == "1 s a step, took 1 (+0%)"
    assert beside.summary()["planned"]["busy_s"] == {"vision": 0.3, "text": 0.6}


@pytest.mark.parametrize(
    ("changed", "kind"),
    [
        ({"step_s": 1.6, "busy_s": {"vision": 0.3, "text": 1.2}}, f"{COMPUTING} of text"),
        ({"step_s": 1.5, "busy_s": {"vision": 0.8, "text": 0.6}}, f"{COMPUTING} of vision"),
        (
            {"step_s": 1.6, "busy_s": {"vision": 0.3, "text": 1.2}, "comm_s": {"vision": 0.05, "text": 0.8}},
            f"{SENDING} of text",
        ),
        ({"step_s": 1.5, "data_s": 0.5}, READING),
        ({"step_s": 1.5}, WAITING),
        ({"step_s": 0.6, "busy_s": {"vision": 0.3, "text": 0.2}}, f"{COMPUTING} of text"),
    ],
)
def test_the_kind_of_cost_that_differs_is_named(changed: dict[str, object], kind: str) -> None:
    beside = after(**changed)
    assert beside.differing() == kind
    assert f": most by {kind}" in (beside.line() or "")


def test_stages_that_work_at_once_are_not_added() -> None:
    apart = replace(PLANNED, step_s=0.65)
    found = after(apart, step_s=0.65).differences()
    assert found[WAITING] == pytest.approx(0.0)


def test_without_a_plan_nothing_is_said() -> None:
    beside = after(Planned())
    assert beside.line() is None and beside.summary() == {} and beside.differing() is None


def test_the_most_of_memory_counts_and_the_first_step_too() -> None:
    beside = PlanVersusRun(PLANNED)
    beside.add(StepMetrics(step=1, step_s=1.0, memory_bytes={"text": 9}, activation_bytes={"text": 7}))
    beside.add(StepMetrics(step=2, step_s=1.0, memory_bytes={"text": 5}, activation_bytes={"text": 8}))
    found = beside.measured()
    assert found["memory_bytes"] == {"text": 9} and found["activation_bytes"] == {"text": 8}
