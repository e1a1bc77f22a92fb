"""What the soak experiment makes of its looks at a run's processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from experiments.soak.__main__ import look, steps_of
from experiments.soak.growth import Sample, floor_slope, growth, kind_of, slope

MIB = 1 << 20


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        (["/x/ray/core/src/ray/raylet/raylet", "--a"], "raylet"),
        (["/x/gcs/gcs_server", "--a"], "gcs_server"),
        (["/x/python", "-u", "/x/ray/dashboard/agent.py", "--a"], "agent.py"),
        (["ray::Worker.execute"], "rank"),
        (["ray::text.step"], "rank"),
        (["ray::_Reader"], "reader"),
        (["ray::data.read"], "reader"),
        (["ray::IDLE"], "IDLE"),
        (["ray::DashboardAgent"], "DashboardAgent"),
        ([], ""),
    ],
)
def test_kinds_of_processes(line: list[str], kind: str) -> None:
    assert kind_of(line) == kind


def test_the_slope_is_that_of_the_line() -> None:
    samples = [Sample(1, "a", step, 50 * MIB + 700 * step) for step in range(0, 1000, 50)]
    assert slope(samples) == pytest.approx(700)


def test_rows_tell_the_process_of_a_kind_that_grows_most_behind_the_first_steps() -> None:
    steady = [Sample(1, "rank", step, 100 * MIB) for step in range(0, 1001, 10)]
    growing = [Sample(2, "rank", step, 100 * MIB + 2048 * step) for step in range(0, 1001, 10)]
    filling = [Sample(3, "driver", step, 80 * MIB + min(step, 200) * MIB) for step in range(0, 1001, 10)]
    gone = [Sample(4, "IDLE", step, 10 * MIB * step) for step in range(0, 500, 10)]
    rows = {row["process"]: row for row in growth([*steady, *growing, *filling, *gone], warm=250)}
    assert rows.keys() == {"rank", "driver"}
    assert (rows["rank"]["count"], rows["rank"]["growth_bytes_a_step"]) == (2, 2048)
    assert (rows["driver"]["growth_bytes_a_step"], rows["driver"]["warm_mib"], rows["driver"]["steps"]) == (
        0,
        280,
        1000,
    )
    assert list(growth([], 10)) == []


def test_a_process_is_looked_at_and_steps_are_counted(tmp_path: Path) -> None:
    (own, *_) = look(os.getpid(), 7)
    assert (own.pid, own.kind, own.step) == (os.getpid(), "driver", 7) and own.own_bytes > MIB
    assert steps_of(tmp_path) == 0
    (tmp_path / "metrics.jsonl").write_text("{}\n{}\n")
    assert steps_of(tmp_path) == 2


def test_the_floor_leaves_out_what_comes_and_goes_and_not_what_stays() -> None:
    steps = range(0, 1000, 5)
    saw = [Sample(1, "reader", step, 90 * MIB + (4 * MIB if step > 600 and step % 20 else 0)) for step in steps]
    assert slope(saw) > 1024 and floor_slope(saw) == pytest.approx(0.0, abs=1)
    leaking = [Sample(1, "reader", step, one.own_bytes + 700 * step) for step, one in zip(steps, saw, strict=True)]
    assert floor_slope(leaking) == pytest.approx(700, rel=0.05)
