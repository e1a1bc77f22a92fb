"""summary.json: the figures of a run, written whole, also when it failed."""

import json
import math
import tracemalloc

import pytest

from dhp.observe.metrics import StepMetrics
from dhp.observe.summary import StepTotals, Summary, versions, write_summary

FIELDS = (
    "status error steps resumed_from restarts skipped_steps first_loss last_loss eval_loss eval_accuracy median_step_s "
    "tokens_per_s idle_share world planned measured planned_ratio differs stragglers versions"
).split()
STEPS = [StepMetrics(step=n, loss=4.0 / n, step_s=seconds, tokens=100) for n, seconds in ((1, 3.0), (2, 0.5), (3, 0.5))]


def test_the_file_has_every_field_in_order(tmp_path):
    summary = Summary.of(STEPS, status="completed", world={"text": {"num_actors": 2, "tensor": 2}})
    written = json.loads(write_summary(tmp_path, summary).read_text())
    assert list(written) == FIELDS
    assert written["world"] == {"text": {"num_actors": 2, "tensor": 2}}
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]


def test_figures_of_the_steps():
    summary = Summary.of(STEPS, status="completed")
    assert (summary.steps, summary.first_loss, summary.last_loss) == (3, 4.0, 4.0 / 3)
    assert (summary.median_step_s, summary.tokens_per_s) == (0.5, 75.0)


def test_steps_that_updated_nothing_are_counted():
    steps = [StepMetrics(step=n, skipped_steps=count) for n, count in ((1, 0), (2, 1), (3, 1))]
    assert Summary.of(steps, status="completed").skipped_steps == 1
    assert Summary.of([], status="failed").skipped_steps == 0


def test_idle_is_what_the_steps_have_beside_computing():
    steps = [
        StepMetrics(step=1, step_s=3.0, busy_s={"vision": 0.5, "text": 2.0}),
        StepMetrics(step=2, step_s=1.0, busy_s={"vision": 0.5, "text": 0.5}),
        StepMetrics(step=3, step_s=9.0),
    ]
    assert Summary.of(steps, status="completed").idle_share == {"vision": 0.75, "text": 0.375}
    assert Summary.of(STEPS, status="completed").idle_share is None


def test_totals_hold_some_bytes_a_step():
    totals = StepTotals()
    tracemalloc.start()
    try:
        for n in range(1, 5001):
            totals.add(StepMetrics(step=n, loss=1.0 / n, step_s=0.5, tokens=100, busy_s={"a": 0.25, "b": 0.5}))
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 64 * 5000
    summary = Summary.of(totals, status="completed")
    assert (summary.steps, summary.first_loss, summary.last_loss) == (5000, 1.0, 1 / 5000)
    assert (summary.median_step_s, summary.tokens_per_s, summary.idle_share) == (0.5, 200.0, {"a": 0.5, "b": 0.0})


def test_a_run_that_failed_before_its_first_step(tmp_path):
    path = write_summary(tmp_path / "new", Summary.of([], status="failed", error="no such file"))
    written = json.loads(path.read_text())
    assert (written["status"], written["error"]) == ("failed", "no such file")
    assert (written["steps"], written["last_loss"]) == (0, None)


def test_a_loss_that_is_no_number_stays_valid_json(tmp_path):
    summary = Summary.of([StepMetrics(step=1, loss=math.nan)], status="completed")
    text = write_summary(tmp_path, summary).read_text()
    assert json.loads(text, parse_constant=pytest.fail)["last_loss"] == "NaN"


def test_a_second_summary_replaces_the_first(tmp_path):
    write_summary(tmp_path, Summary(status="failed"))
    assert json.loads(write_summary(tmp_path, Summary(status="completed")).read_text())["status"] == "completed"


def test_versions_without_importing_the_packages():
    assert list(versions()) == ["python", "dhp", "torch", "transformers", "ray", "deepspeed"]
    assert versions()["torch"]
