"""The tables of a report."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from dhp.observe.metrics import AnswerMetrics
from dhp.report.bound import times_of
from dhp.report.page import runs_page
from dhp.report.run_record import RunRecord, read_run
from dhp.report.tables import (
    HIGHEST,
    MOST_EVENTS,
    MOST_OPENED,
    Gallery,
    answers_beside,
    answers_table,
    differences_table,
    events_table,
    figures,
    highest_losses,
    links_table,
    losses_table,
    opened_steps,
    samples_table,
)
from tests.helpers.made_runs import make_run


def record_of(run_dir: Path) -> RunRecord:
    return read_run(run_dir)


def test_steps_that_stand_out_are_opened(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", steps=300, loss=lambda step: 9.0 if step == 150 else 6.0 / step**0.5)
    opened = opened_steps(record_of(run_dir))
    assert opened[150] == "high loss" and 150 in opened and len(opened) <= MOST_OPENED + 1
    assert list(opened) == sorted(opened)


def test_a_loss_that_is_not_finite_stands_out_most(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", steps=50, loss=lambda step: float("nan") if step == 20 else 1.0)
    assert opened_steps(record_of(run_dir))[20] == "high loss"


def test_the_samples_of_highest_loss_are_late_ones_each_with_its_latest(tmp_path: Path) -> None:
    """Rows of a step are its number and the next, so each row comes twice; in the beginning all losses are high."""

    def losses(step: int) -> dict[str, list[Any]]:
        high = {37: float("nan"), 34: 5.0, 35: 4.0}  # row 35 had the highest in step 34: step 35 replaces it
        return {"shapes": [high.get(step, 100.0 if step < 30 else step / 100), 9.0 if step == 34 else None]}

    record = record_of(make_run(tmp_path / "run", steps=40, losses=losses))
    found = highest_losses(record)
    assert [(one.step, one.row) for one in found[:4]] == [(37, 37), (34, 34), (35, 35), (40, 40)]
    assert math.isnan(found[0].loss) and [one.loss for one in found[1:4]] == [5.0, 4.0, 0.4]
    assert len(found) == HIGHEST and min(one.step for one in found) == 31
    text = losses_table(found, {34: "a sample of high loss"}, Gallery({}))
    assert '<td>5</td><td><a href="#step-34">34</a></td><td>shapes</td><td>34</td>' in text
    assert "<td>nan</td><td>37</td>" in text
    opened = opened_steps(record, found)
    assert opened[34] == "a sample of high loss" and {one.step for one in found} <= set(opened)


def test_of_a_run_of_several_epochs_the_last_one_counts(tmp_path: Path) -> None:
    losses = lambda step: {"shapes": [1.0 / step, None]}
    record = record_of(make_run(tmp_path / "run", steps=8, losses=losses, epoch=lambda step: step / 4))
    assert [one.step for one in highest_losses(record)] == [5, 6, 7, 8]
    longer = record_of(make_run(tmp_path / "longer", steps=40, losses=losses, epoch=lambda step: step / 8))
    assert [one.step for one in highest_losses(longer)] == list(range(33, 41))


def test_a_run_of_before_has_no_losses_of_samples(tmp_path: Path) -> None:
    assert highest_losses(record_of(make_run(tmp_path / "run"))) == []


def test_an_opened_step_lists_its_samples(tmp_path: Path) -> None:
    record = record_of(make_run(tmp_path / "run", steps=3))
    text = samples_table(record, {2: ""}, Gallery({}))
    assert '<a id="step-2"></a>2' in text and "shapes: 2, 3" in text and "step-1" not in text


def test_events_and_faults_stand_in_order_of_time(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", saves={5: 0.25})
    (run_dir / "faults").mkdir()
    fault = {"at": 103.0, "step": 4, "message": "text rank 1 died", "followed_by": "resumed"}
    (run_dir / "faults" / "001.json").write_text(json.dumps(fault))
    text = events_table(record_of(run_dir))
    assert text.index("start") < text.index("text rank 1 died → resumed") < text.index("0.25")


def test_many_events_are_cut_in_the_middle(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", steps=500, saves=dict.fromkeys(range(1, 401), 0.1))
    text = events_table(record_of(run_dir))
    assert text.count("<tr>") == MOST_EVENTS + 1 and "201 events between them are left out" in text


def answered(run_dir: Path, *answers: tuple[int, str], asked: str = "Which?") -> Path:
    """A run with answers, each behind a step, to a question whose reference is red."""
    with (make_run(run_dir) / "metrics.jsonl").open("a") as file:
        for step, answer in answers:
            about = AnswerMetrics(
                step=step, dataset="d", number=1, prompt=asked, reference="red", answer=answer, tokens=2, row=0
            )
            file.write(json.dumps(asdict(about)) + "\n")
    return run_dir


def test_answers_stand_beside_their_reference_over_time(tmp_path: Path) -> None:
    text = answers_table(record_of(answered(tmp_path / "run", (5, "blue"), (10, "red"))), Gallery({}))
    assert "after step 5" in text and '<span class="other">blue</span>' in text
    assert '<span class="right">red</span>' in text and "Which?" in text


def test_last_answers_of_runs_stand_beside_each_other(tmp_path: Path) -> None:
    first = record_of(answered(tmp_path / "first", (5, "green"), (10, "red")))
    second = record_of(answered(tmp_path / "second", (5, "blue")))
    text = answers_beside([first, second], [Gallery({})] * 2)
    assert text.index('class="right">red') < text.index('class="other">blue') and "green" not in text
    assert text.count("<tr>") == 2
    assert text in runs_page([first, second])


def test_only_what_several_runs_were_asked_is_compared(tmp_path: Path) -> None:
    first = record_of(answered(tmp_path / "first", (5, "red")))
    other = record_of(answered(tmp_path / "other", (5, "red"), asked="What?"))
    silent = record_of(make_run(tmp_path / "silent"))
    assert answers_beside([first, other, silent], [Gallery({})] * 3) == ""
    assert "last answers" not in runs_page([first, other])
    assert answers_beside([first, silent, first], [Gallery({})] * 3).count('class="other">-<') == 1


def test_a_picture_is_of_a_run_that_was_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent, first = record_of(make_run(tmp_path / "silent")), record_of(answered(tmp_path / "first", (5, "red")))
    galleries = [Gallery({}) for _ in range(3)]
    for number, gallery in enumerate(galleries):
        monkeypatch.setattr(gallery, "images", lambda dataset, row, n=number: f"picture {row} of run {n}")
    text = answers_beside([silent, first, first], galleries)
    assert "picture 0 of run 1" in text and "of run 0" not in text


def test_runs_of_one_configuration_say_so(tmp_path: Path) -> None:
    records = [record_of(make_run(tmp_path / name)) for name in ("a", "b")]
    assert "the same configuration" in differences_table(records)


def test_figures_and_rates(tmp_path: Path) -> None:
    record = record_of(make_run(tmp_path / "run"))
    times = times_of(record)
    found = figures(record, times)
    assert (found["status"], found["steps"], found["step"], found["held-out accuracy"]) == (
        "completed",
        "20",
        "1 s",
        "held_out 50.0%",
    )
    assert "50 MiB/s a rank" in links_table(record, times)  # half a MiB a rank in 0.01 s
