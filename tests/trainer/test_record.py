"""The page of a run that ends: written where it can be, and never a reason for the run to fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from dhp.trainer import step_reports
from dhp.trainer.step_reports import write_page
from tests.helpers.made_runs import make_run


def test_a_run_that_ends_has_its_page(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    assert write_page(run_dir) == str(run_dir / "report.html")
    assert (run_dir / "report.html").read_text().startswith("<!doctype html>")


def test_a_run_of_very_many_steps_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_reports, "MOST_STEPS", 5)
    run_dir = make_run(tmp_path / "run", steps=6)
    assert write_page(run_dir) is None and not (run_dir / "report.html").exists()
    monkeypatch.undo()
    monkeypatch.setattr(step_reports, "MOST_BYTES", 100)
    assert write_page(run_dir) is None


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ZeroDivisionError("of a\nmistake")])
def test_a_page_that_cannot_be_made_says_why(error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*given: object) -> None:
        raise error

    monkeypatch.setattr(step_reports, "write_report", fail)
    said = write_page(make_run(tmp_path / "run"))
    assert said is not None and said.startswith(f"none ({type(error).__name__}: ") and "\n" not in said


def test_a_run_without_a_step_says_that_there_is_nothing_to_report(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    (run_dir / "metrics.jsonl").write_text("")
    assert "no step yet" in str(write_page(run_dir))
