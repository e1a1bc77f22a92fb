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
    with pytest.raises(type(error)), Recorder(tmp_path, 1, {}) as recorder:
        recorder.record(StepMetrics(step=1, loss=2.0))
        raise error
    assert (summary(tmp_path)["status"], summary(tmp_path)["error"], summary(tmp_path)["steps"]) == (status, told, 1)


def test_the_record_stands_before_the_teardown_that_may_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OSError), Recorder(tmp_path, 1, {}) as recorder:
        with recorder.before_teardown():
            recorder.record(StepMetrics(step=1, loss=2.0))
        assert summary(tmp_path)["status"] == "completed"
        raise OSError("the cluster is gone")
    assert summary(tmp_path)["status"] == "completed"
    assert capsys.readouterr().out.count("status") == 1
