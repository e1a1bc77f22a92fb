"""Where a step's time went: pieces add up to the step, and pace is time over work."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dhp.report.bound import KINDS, pace_rows, split_by_rank, times_of
from dhp.report.run_record import read_run
from tests.helpers.made_runs import healthy_ranks, make_run


def test_the_pieces_of_a_rank_add_up_to_the_step_and_its_checkpoints(tmp_path: Path) -> None:
    times = times_of(read_run(make_run(tmp_path / "run", data_s=0.1, saves={5: 0.5, 10: 0.4})))
    assert times is not None and len(times.step_s) == 18  # two warm up
    rows = split_by_rank(times)
    assert list(rows) == ["vision rank 0", "vision rank 1", "text rank 0", "text rank 1"]
    for row in rows.values():
        assert tuple(row) == KINDS and sum(row.values()) == pytest.approx(1.0 + 0.9 / 18)
        assert (row["data"], row["forward"], row["collective"]) == pytest.approx((0.1, 0.15, 0.01))
        assert row["waiting for others"] == pytest.approx(1.0 - 0.1 - 0.48)
    assert times.mean_s == pytest.approx(1.05)


def test_a_step_of_another_attempt_warms_up_too(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    with (run_dir / "events.jsonl").open("a") as file:
        file.write('{"event": "start", "step": 10, "time": 5.0}\n')
    times = times_of(read_run(run_dir))
    assert times is not None
    assert [one.step for one in times.steps] == [*range(3, 11), *range(13, 21)]


def test_pace_is_seconds_over_work_beside_the_median_rank(tmp_path: Path) -> None:
    def seconds(step: int) -> dict[str, dict[str, list[float]]]:
        return {"text": {"forward": [0.2, 0.4, 0.2, 0.3], "comm": [0.2, 0.0, 0.2, 0.1]}}

    work = {"text": [1.0, 2.0, 1.0, 0.0]}
    run_dir = make_run(tmp_path / "run", seconds=seconds, work=lambda step: work)
    times = times_of(read_run(run_dir))
    assert times is not None
    names, steps, pace = pace_rows(times)
    assert names[1] == "text rank 1" and steps[0] == 3
    assert pace[:3] == pytest.approx(np.ones((3, 18))) and np.isnan(pace[3]).all()  # it had nothing to do


def test_a_run_of_one_step_is_split_too(tmp_path: Path) -> None:
    times = times_of(read_run(make_run(tmp_path / "run", steps=1)))
    assert times is not None and len(times.step_s) == 1 and len(split_by_rank(times)) == 4


def test_without_lines_of_ranks_there_is_no_split(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    (run_dir / "ranks.jsonl").unlink()
    times = times_of(read_run(run_dir))
    assert times is not None and split_by_rank(times) == {}


def test_steps_in_another_layout_are_left_out_not_the_stage(tmp_path: Path) -> None:
    """As behind a restart with fewer devices; a step in which nothing was measured is left out too."""

    def seconds(step: int) -> dict[str, dict[str, list[float]]]:
        if step == 15:
            return healthy_ranks() | {"text": {}}
        three = {kind: [*of, of[0]] for kind, of in healthy_ranks()["text"].items()}
        return healthy_ranks() | ({"text": three} if step < 10 else {})

    times = times_of(read_run(make_run(tmp_path / "run", seconds=seconds, status=None)))
    assert times is not None
    assert times.stages["text"].own.shape == (10, 2) and times.stages["vision"].own.shape == (18, 2)
    assert 15 not in times.stages["text"].steps
    names, steps, pace = pace_rows(times)
    assert len(names) == 4 and np.isnan(pace[3, : steps.index(10)]).all() and np.isfinite(pace[3, -1])
    assert sum(split_by_rank(times)["text rank 1"].values()) == pytest.approx(1.0)
