"""Which charts a run has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dhp.report.bound import times_of
from dhp.report.charts import MOST_POINTS, Box, Label, Polyline
from dhp.report.run_record import read_run
from dhp.report.views import GIB, MOST_BARS, learning_views, load_views, memory_views, sent_bytes, time_views
from tests.helpers.made_runs import make_run


def test_memory_stands_beside_the_plan(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    planned = {"memory_kinds": {"text": {"weights": 2 * GIB, "activations": GIB}}}
    measured = {"memory_bytes": {"text": 4 * GIB}}
    (run_dir / "summary.json").write_text(json.dumps({"status": "completed", "planned": planned, "measured": measured}))
    (drawing,) = memory_views(read_run(run_dir))
    boxes = [one for one in drawing.shapes if isinstance(one, Box) and one.title]
    assert [one.title for one in boxes] == [
        "text, planned, weights: 2 GiB",
        "text, planned, activations: 1 GiB",
        "text, measured, all kinds: 4 GiB",
    ]


def test_without_memory_there_is_no_chart_of_it(tmp_path: Path) -> None:
    assert list(memory_views(read_run(make_run(tmp_path / "run")))) == []


def test_held_out_loss_is_drawn_with_the_loss(tmp_path: Path) -> None:
    charts = {one.name: one for one in learning_views(read_run(make_run(tmp_path / "run")), {})}
    assert list(charts) == ["loss", "accuracy", "grad_norm", "lr"]
    labels = {name: {one.text for one in chart.shapes if isinstance(one, Label)} for name, chart in charts.items()}
    assert "held out: held_out" in labels["loss"] and {"all together", "vision", "text"} <= labels["grad_norm"]


def test_many_ranks_have_bars_for_the_first_and_the_last(tmp_path: Path) -> None:
    ranks = 100
    seconds = {"text": {"forward": [0.1] * ranks, "comm": [0.0] * ranks}}
    run_dir = make_run(tmp_path / "run", seconds=lambda step: seconds, work=lambda step: {"text": [1.0] * ranks})
    times = times_of(read_run(run_dir))
    assert times is not None
    bars, pace = time_views(times)
    assert len([one for one in bars.shapes if isinstance(one, Label) and "rank" in one.text]) == MOST_BARS
    assert pace.height < 600


def test_bytes_are_those_of_a_mean_step(tmp_path: Path) -> None:
    record = read_run(make_run(tmp_path / "run"))
    assert sent_bytes(record.steps) == {"text": {"all_reduce": pytest.approx(2**20)}}
    charts = {one.name: one for one in load_views(record)}
    assert list(charts) == ["tokens", "balance", "step_s", "sent"]
    longest = max(len(one.points) for one in charts["tokens"].shapes if isinstance(one, Polyline))
    assert longest == min(20, MOST_POINTS)
