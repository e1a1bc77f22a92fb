"""What is read of runs that ended, go on, failed, or left lines that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from dhp.core.errors import RecordError
from dhp.report.run_record import read_run
from tests.helpers.made_runs import make_run


def test_a_run_is_read_whole(tmp_path: Path) -> None:
    record = read_run(make_run(tmp_path / "run", steps=4, saves={2: 0.5}))
    assert (record.name, record.status, len(record.steps), len(record.ranks), record.broken) == (
        "run",
        "completed",
        4,
        4,
        0,
    )
    assert record.stages == ["vision", "text"] and record.config["text.tensor"] == 2
    assert [(one.event, one.step, one.seconds) for one in record.events] == [("start", 0, None), ("save", 2, 0.5)]


def test_a_run_that_goes_on_or_was_killed_is_read_as_far_as_it_came(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", steps=4, status=None)
    for name in ("metrics.jsonl", "ranks.jsonl", "events.jsonl"):
        with (run_dir / name).open("a") as file:
            file.write('{"kind": "train", "step": 5, "lo')
    record = read_run(run_dir)
    assert (record.status, len(record.steps), len(record.ranks), record.broken) == ("not ended", 4, 4, 1)


def test_lines_of_ranks_beyond_the_last_step_are_left_out(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", steps=4)
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    (run_dir / "metrics.jsonl").write_text("\n".join(lines[:2]) + "\n")
    assert [line.step for line in read_run(run_dir).ranks] == [1, 2]


def test_what_is_no_run_is_said(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no metrics.jsonl, so it is no run's directory"):
        read_run(tmp_path)
    make_run(tmp_path / "runs" / "stage_1")
    with pytest.raises(RecordError, match=r"stage_2 does not exist; did you mean .*runs/stage_1\?$"):
        read_run(tmp_path / "runs" / "stage_2")
    with pytest.raises(RecordError, match=r"metrics.jsonl is a file: give the run's directory, as .*stage_1$"):
        read_run(tmp_path / "runs" / "stage_1" / "metrics.jsonl")
    with pytest.raises(RecordError, match=r"zzz does not exist$"):
        read_run(tmp_path / "runs" / "zzz")
    with pytest.raises(RecordError, match=r"Runs, or a run's stages, are in it: dhp report .*stage_1"):
        read_run(tmp_path / "runs")


def test_a_run_without_a_step_has_nothing_to_report(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", steps=2)
    (run_dir / "metrics.jsonl").write_text("")
    (run_dir / "summary.json").unlink()
    with pytest.raises(RecordError, match="no step yet: there is nothing to report on$"):
        read_run(run_dir)
    (run_dir / "summary.json").write_text('{"status": "failed", "error": "PartFailed: text rank 1 died"}')
    with pytest.raises(RecordError, match=r"report on\. The run failed: PartFailed: text rank 1 died$"):
        read_run(run_dir)
