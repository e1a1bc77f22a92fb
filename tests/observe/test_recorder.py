"""The record of a run: written once, however and wherever the run ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dhp.observe.metrics import StepMetrics
from dhp.observe.recorder import Recorder


def summary(run_dir: Path) -> dict:
    return json.loads((run_dir / "summary.json").read_text())


@pytest.mark.parametrize(
    ("error", "status", "told"),
    [(ValueError("bad"), "failed", "bad"), (KeyboardInterrupt(), "interrupted", None)],
    ids=["failed", "interrupted"],
)
def test_an_end_is_recorded_and_passes_through(
    tmp_path: Path, error: BaseException, status: str, told: str | None
) -> None:
    with pytest.raises(type(error)), Recorder(tmp_path, 1, {}, "seed: 0\n") as recorder:
        recorder.record(StepMetrics(step=1, loss=2.0))
        raise error
    assert (summary(tmp_path)["status"], summary(tmp_path)["error"], summary(tmp_path)["steps"]) == (status, told, 1)


def test_the_record_stands_before_the_teardown_that_may_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OSError), Recorder(tmp_path, 1, {}, "seed: 0\n") as recorder:
        with recorder.before_teardown():
            recorder.record(StepMetrics(step=1, loss=2.0))
        assert summary(tmp_path)["status"] == "completed"
        raise OSError("the cluster is gone")
    assert summary(tmp_path)["status"] == "completed"
    assert capsys.readouterr().out.count("status") == 1


def begun(run_dir: Path) -> None:
    with Recorder(run_dir, 1, {}, "seed: 0\n") as recorder:
        for step in (1, 2, 3):
            recorder.record(StepMetrics(step=step, loss=2.0))


def test_a_run_that_cannot_be_continued_stays_as_it_was(tmp_path: Path) -> None:
    begun(tmp_path)
    before = {file.name: file.read_text() for file in tmp_path.iterdir() if file.is_file()}
    with pytest.raises(ValueError), Recorder(tmp_path, 1, {}, "seed: 7\n", tmp_path / "step_2", 2):
        raise ValueError("other data")
    assert {name: (tmp_path / name).read_text() for name in before} == before
    assert set(before) >= {"config.yaml", "metrics.jsonl", "summary.json"}


def test_a_run_that_is_continued_goes_on_in_its_record(tmp_path: Path) -> None:
    begun(tmp_path)
    with Recorder(tmp_path, 1, {}, "seed: 7\n", tmp_path / "step_2", 2) as recorder:
        recorder.begin(4)
        assert not (tmp_path / "summary.json").exists()
        recorder.record(StepMetrics(step=3, loss=1.0))
    steps = [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert steps == [2.0, 2.0, 1.0] and (tmp_path / "config.yaml").read_text() == "seed: 7\n"
    assert summary(tmp_path)["steps"] == 3


def test_a_run_with_nothing_left_to_do_is_recorded_as_completed(tmp_path: Path) -> None:
    begun(tmp_path)
    (tmp_path / "summary.json").unlink()
    with Recorder(tmp_path, 1, {}, "seed: 0\n", tmp_path / "step_3", 3):
        pass
    assert (summary(tmp_path)["status"], summary(tmp_path)["steps"]) == ("completed", 3)
