"""The table of the documents is what the command makes of the rows that are kept."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments.gpu_check import report
from experiments.gpu_check.report import BEGIN, END, NOTHING, PAGE, ROOT, read_latest, table, with_table

MACHINE = {"section": "probe", "row": "machine", "ok": True, "device": "NVIDIA H200", "driver": "580", "torch": "2.11"}
STEP = {"section": "full_depth", "row": "8 samples", "ok": True, "step_ms": 1234.56, "mfu": 0.391, "mfus": 1}
FAILED = {"section": "waits", "row": "1+1", "error": "ValueError: a | b\nmore"}


def write(file: Path, *rows: dict[str, Any], run: str = "2026-01-02T03:04:05+00:00") -> Path:
    with file.open("a") as out:
        out.writelines(json.dumps({"run": run} | row) + "\n" for row in rows)
    return file


def test_the_page_has_the_table_of_the_rows_that_are_kept() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page, read_latest(ROOT / "results" / "gpu.jsonl")) == page


def test_a_table_of_a_gpu(tmp_path: Path) -> None:
    rows = read_latest(write(tmp_path / "gpu.jsonl", MACHINE, STEP, FAILED))
    head, _, *lines = table(rows).splitlines()
    assert head.startswith("NVIDIA H200, driver 580, torch 2.11, run of 2026-01-02.")
    assert lines[2:] == [
        "| full_depth | 8 samples | right | ms a step 1234.6, MFU 39.1% |",
        "| waits | 1+1 | failed | ValueError: a / b |",
    ]


def test_of_several_runs_the_last_and_of_a_row_what_was_written_last(tmp_path: Path) -> None:
    file = write(tmp_path / "gpu.jsonl", MACHINE, FAILED, run="2025")
    write(file, MACHINE, STEP)
    write(file, STEP | {"step_ms": 1000.0})
    rows = read_latest(file)
    assert [row["row"] for row in rows] == ["machine", "8 samples"]
    assert rows[1]["step_ms"] == 1000.0


def test_without_rows_of_a_gpu_nothing_was_measured(tmp_path: Path) -> None:
    assert read_latest(tmp_path / "none.jsonl") == []
    assert table([]) == table(read_latest(write(tmp_path / "gpu.jsonl", MACHINE | {"device": "cpu"}, STEP))) == NOTHING


def test_the_command_writes_both_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, page = write(tmp_path / "gpu.jsonl", MACHINE, STEP), tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nold\n{END}\nafter\n")
    monkeypatch.setattr(sys, "argv", ["report", str(file), "--page", str(page)])
    assert report.main() == 0
    assert page.read_text() == f"before\n{BEGIN}\n{table(read_latest(file))}\n{END}\nafter\n"
    kept = json.loads((tmp_path / "gpu.json").read_text())
    assert kept["sections"]["full_depth"] == [
        {"row": "8 samples", "ok": True, "step_ms": 1234.56, "mfu": 0.391, "mfus": 1}
    ]


def test_a_page_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="has no <!-- gpu_check: begin"):
        with_table("nothing", [])
