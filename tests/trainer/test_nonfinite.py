"""Steps that are not finite: counted, named, and at last the end of the run."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from dhp.__main__ import main as dhp
from dhp.core.reports import StageReport
from dhp.observe.metrics import EvalMetrics, StepMetrics
from dhp.trainer.trainer import NAMED, NonfiniteCount, count_before, last_line, line, listed
from tests.helpers.runs import tiny, train


def report(rank: int, finite: bool) -> StageReport:
    return StageReport(rank, None, 1.0 if finite else math.nan, {}, None, {}, finite=finite)


def added(count: NonfiniteCount, *steps: bool) -> list[tuple[int, int, bool]]:
    """Of each step, finite or not: the run's count, those in a row, and whether they are too many."""
    found = []
    for finite in steps:
        count.add({"vision": [report(0, finite)], "text": [report(0, finite), report(1, finite)]})
        found.append((count.count, count.in_a_row, count.too_many))
    return found


def test_a_finite_step_begins_the_row_anew() -> None:
    found = added(NonfiniteCount(3), True, False, False, True, False, False, False)
    assert [step[:2] for step in found] == [(0, 0), (1, 1), (2, 2), (2, 0), (3, 1), (4, 2), (5, 3)]
    assert [step[2] for step in found] == [False] * 6 + [True]


@pytest.mark.parametrize("limit", [0, 1])
def test_the_first_may_be_the_last(limit: int) -> None:
    assert added(NonfiniteCount(limit), True, False) == [(0, 0, False), (1, 1, True)]


def test_a_run_that_goes_on_counts_on() -> None:
    lines = [StepMetrics(step=1, skipped_steps=0), StepMetrics(step=2, skipped_steps=1)]
    assert count_before([*lines, EvalMetrics(step=2, dataset=""), StepMetrics(step=3, skipped_steps=2)], 2) == 1
    assert count_before(lines[:1], 1) == 0 and count_before([], 4) == 0
    assert count_before([StepMetrics(step=1)], 1) == 0  # of a release that did not count them
    assert added(NonfiniteCount(3, 4), False) == [(5, 1, False)]


METRICS = StepMetrics(step=7, loss=math.inf, grad_norm=math.nan)


def test_lines_name_step_values_and_samples() -> None:
    said = line(METRICS, 2, 3, ["index=4, dataset 'a', line 5 of a.jsonl"])
    assert said.startswith("the gradient norm of step 7 is nan and its loss inf: nothing was updated (2 in a row; ")
    assert said.endswith("`python -m dhp inspect sample`: index=4, dataset 'a', line 5 of a.jsonl")
    last = last_line(METRICS, 3, 3, ["index=4"])
    assert "number 3 in a row" in last and "weights are those after step 4. Lower training.learning_rate" in last


def test_of_many_samples_some_are_named() -> None:
    assert listed([str(n) for n in range(NAMED)]).endswith(f"; {NAMED - 1}")
    assert listed([str(n) for n in range(NAMED + 5)]).endswith(f"; {NAMED - 1}; and 5 more")


def test_a_run_skips_such_steps_names_their_samples_and_ends(tiny_assets: Path, tmp_path: Path) -> None:
    """A rate that no weight survives: all steps behind the first are broken."""
    run_dir = tmp_path / "run"
    wild = ["training.learning_rate=1e30", "training.warmup_ratio=0", "training.lr_scheduler_type=constant"]
    outcome = train(*tiny(tiny_assets, run_dir, *wild, "training.max_steps=9", "training.max_nonfinite_steps=3"))
    assert outcome.status == 1
    assert "Diverged: the gradient norm of step 4 is " in outcome.stderr and "Traceback" not in outcome.stderr
    assert "weights are those after step 1." in outcome.stderr
    lines = [json.loads(one) for one in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [one["skipped_steps"] for one in lines] == [0, 1, 2, 3]
    assert len({one["sample_digest"] for one in lines}) == 4
    assert isinstance(lines[0]["loss"], float) and lines[2]["grad_norm"] in ("NaN", "Infinity")
    told = json.loads((run_dir / "summary.json").read_text())
    assert (told["status"], told["steps"], told["skipped_steps"]) == ("failed", 4, 3)
    said = next(one for one in outcome.stderr.splitlines() if "gradient norm of step 3 is" in one)
    named = re.findall(r"index=(\d+), (dataset 'shapes', element \d+ of [^;]+)", said)
    assert len(named) == lines[2]["samples"]
    index, where = named[0]
    page = tmp_path / "page.html"
    assert dhp(["inspect", "sample", *tiny(tiny_assets, run_dir)[:2], f"index={index}", f"out={page}"]) == 0
    assert where.replace("'", "&#x27;") in page.read_text()
