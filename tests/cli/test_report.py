"""`dhp report`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dhp.cli.report import main
from dhp.core.errors import ConfigError, RecordError
from tests.helpers.made_runs import make_run


def test_it_says_what_bounds_the_run_and_where_the_page_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_run(tmp_path / "run", data_s=0.5, step_s=lambda step: 1.5)
    assert main([str(run_dir), "--png", str(tmp_path / "png")]) == 0
    said, where = capsys.readouterr().out.splitlines()
    assert said.startswith("This run is bound by waiting for data: 33% of a step.")
    assert where == str(run_dir / "report.html") and (tmp_path / "png" / "loss.png").exists()


@pytest.mark.parametrize(
    ("summary", "said"),
    [
        (None, "not ended after step 20: it goes on, or was killed"),
        ({"status": "failed", "error": "PartFailed: text rank 1 died\x1b[2J"},
         "failed after step 20: PartFailed: text rank 1 died\\x1b[2J"),
        ({"status": "interrupted"}, "interrupted after step 20"),
        ({"status": "completed"}, None),
    ],
)  # fmt: skip
def test_a_run_that_did_not_complete_says_so_first(
    summary: dict[str, str] | None, said: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(tmp_path / "run", status=None)
    if summary is not None:
        (run_dir / "summary.json").write_text(json.dumps(summary))
    assert main([str(run_dir)]) == 0
    *first, sentence, _ = capsys.readouterr().out.splitlines()
    assert first == ([] if said is None else [said]) and sentence.startswith("This run is healthy")


def test_lines_that_cannot_be_read_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_run(tmp_path / "run")
    whole = (run_dir / "metrics.jsonl").read_text()
    (run_dir / "metrics.jsonl").write_text(whole[:-20])
    assert main([str(run_dir)]) == 0
    assert capsys.readouterr().out.startswith("left out: 1 line of metrics.jsonl that cannot be read\n")


def test_several_runs_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [str(make_run(tmp_path / name)) for name in ("a", "b")]
    assert main([*runs, "--out", str(tmp_path / "both.html")]) == 0
    first, second, where = capsys.readouterr().out.splitlines()
    assert first.startswith("a: This run is healthy") and second.startswith("b: ") and where.endswith("both.html")


def test_a_run_named_twice_and_no_run_are_refused(tmp_path: Path) -> None:
    run_dir = str(make_run(tmp_path / "a"))
    with pytest.raises(ConfigError, match="named twice"):
        main([run_dir, run_dir])
    with pytest.raises(RecordError, match="nothing does not exist$"):
        main([str(tmp_path / "nothing")])
