"""The page of a run: parts, tables, views."""

import json
import math
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dhp.core.errors import RecordError
from dhp.observe.metrics import AnswerMetrics
from dhp.report.bound import KINDS, pace_rows, split_by_rank, times_of
from dhp.report.charts import MOST_POINTS, Box, Label, Polyline
from dhp.report.page import drawings, runs_page, write_report
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
from dhp.report.views import GIB, MOST_BARS, learning_views, load_views, memory_views, sent_bytes, time_views
from tests.helpers.made_runs import healthy_ranks, make_run

VOID = {"meta", "img", "br"}


class Structure(HTMLParser):
    """Checks that elements close in order, and collects headings, anchors and addresses."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.addresses: list[str] = []
        self.headings: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids += [values["id"] or ""] if "id" in values else []
        self.addresses += [values[key] or "" for key in ("href", "src") if key in values]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("h1", "h2"):
            self.headings.append(data)


def structure(page: Path) -> Structure:
    found = Structure()
    found.feed(page.read_text(encoding="utf-8"))
    assert not found.open
    return found


def test_parts_stand_in_order_and_every_point_leads_somewhere(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", saves={5: 0.1})
    page = structure(write_report([run_dir], tmp_path / "report.html"))
    assert page.headings == [
        "run: completed",
        "Where a step's time went",
        "Learning",
        "Samples of steps",
        "Load and speed",
        "Events",
    ]
    links = [one[1:] for one in page.addresses if one.startswith("#")]
    assert links and set(links) <= set(page.ids)


def test_nothing_is_fetched_and_no_script_runs(tmp_path: Path) -> None:
    page = write_report([make_run(tmp_path / "run")], tmp_path / "report.html")
    assert all(one.startswith(("#", "data:")) for one in structure(page).addresses)
    text = page.read_text()
    assert "<script" not in text and "default-src 'none'" in text and not re.search(r"https?://|@import|url\(", text)
    assert "prefers-color-scheme: dark" in text and "@media print" in text and "width=device-width" in text


def test_samples_of_highest_loss_are_shown_behind_the_curves(tmp_path: Path) -> None:
    """With their picture and text, and a way to their step; lines that are not as a run writes them do no harm."""
    Image.new("RGB", (8, 8), "red").save(tmp_path / "red.png")
    turns = [{"from": "human", "value": "<image>Which <b>?"}, {"from": "gpt", "value": "A wrong answer."}]
    samples = [{"image": "red.png", "conversations": turns}] * 22
    (tmp_path / "shapes.json").write_text(json.dumps(samples))
    entry = {"annotation_path": str(tmp_path / "shapes.json"), "data_path": str(tmp_path)}
    config = {"data": {"data_registry": {"shapes": entry}}}
    run_dir = make_run(tmp_path / "run", losses=lambda step: {"shapes": [step / 10, None]}, config=config)
    *before, last = (run_dir / "ranks.jsonl").read_text().splitlines()
    line = json.loads(last)
    line["samples"]["<i>"], line["losses"] = ["<s>", 1], line["losses"] | {"<i>": ["x", 9.0, 1], "other": [1]}
    (run_dir / "ranks.jsonl").write_text("\n".join([*before, json.dumps(line), ""]))
    out = write_report([run_dir], tmp_path / "report.html")
    page, text = structure(out), out.read_text()
    assert page.headings[2:5] == ["Learning", "Samples of highest loss", "Samples of steps"]
    own = text[text.index("Samples of highest loss") : text.index("Samples of steps")]
    assert own.index("<td>9</td>") < own.index('<td>2</td><td><a href="#step-20">20</a></td><td>shapes</td><td>20</td>')
    assert own.count('<img src="data:image/jpeg') == 5 and "Which &lt;b&gt;?" in own and "A wrong answer." in own
    assert {one[1:] for one in page.addresses if one.startswith("#")} <= set(page.ids) and "<i>" not in own


@pytest.mark.slow
def test_ten_thousand_steps_are_two_megabytes_at_most(tmp_path: Path) -> None:
    losses = lambda step: {"shapes": [1.0 / step, 2.0]}
    page = write_report([make_run(tmp_path / "run", steps=10_000, losses=losses)], tmp_path / "report.html")
    assert page.stat().st_size <= 2_000_000


def test_a_run_of_one_step_and_one_that_goes_on_have_their_page(tmp_path: Path) -> None:
    for name, steps, status in (("one", 1, "completed"), ("on", 8, None), ("failed", 8, "failed")):
        page = structure(write_report([make_run(tmp_path / name, steps, status=status)], tmp_path / f"{name}.html"))
        assert page.headings[0] == f"{name}: {status or 'not ended'}"


def test_what_differs_between_runs_comes_first(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", config={"seed": 7})]
    page = write_report(runs, tmp_path / "both.html")
    assert structure(page).headings == ["a beside b", "What differs", "What came of it", "Side by side"]
    text = page.read_text()
    assert "<td>seed</td><td>-</td><td>7</td>" in text and "<td>text.tensor</td>" not in text


def test_untrusted_text_is_escaped(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    with (run_dir / "events.jsonl").open("a") as file:
        file.write('{"event": "skipped", "step": 3, "time": 1.0, "text": "<img src=x>\\u001b[31m"}\n')
        file.write('{"event": "<meta a>", "step": 3, "time": 1.0}\n{"event": "save", "step": "<b>", "time": 1.0}\n')
    ranks = (run_dir / "ranks.jsonl").read_text()
    (run_dir / "ranks.jsonl").write_text(ranks.replace('"samples": {"shapes": [1, 2]}', '"samples": {"<i>": ["<s>"]}'))
    text = write_report([run_dir], tmp_path / "report.html").read_text()
    assert "&lt;img src=x&gt;\\x1b" in text and "<img src=x>" not in text
    assert "&lt;meta a&gt;" in text and "&lt;s&gt;" in text
    assert not any(word in text for word in ("<meta a>", "<s>", "<i>", "<b>:"))


def test_charts_are_written_as_pictures(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    write_report([run_dir], tmp_path / "report.html", tmp_path / "png")
    names = {one.name for one in drawings([read_run(run_dir)])}
    assert {path.stem for path in (tmp_path / "png").iterdir()} == names
    assert {"step_by_rank", "pace", "loss", "grad_norm", "lr", "tokens", "balance", "step_s", "sent"} <= names


def test_what_is_no_run_leaves_no_page(tmp_path: Path) -> None:
    with pytest.raises(RecordError):
        write_report([tmp_path], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


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


def test_the_pieces_of_a_rank_add_up_to_the_step_and_its_checkpoints(tmp_path: Path) -> None:
    times = times_of(read_run(make_run(tmp_path / "run", data_s=0.1, saves={5: 0.5, 10: 0.4})))
    assert times is not None and len(times.step_s) == 18  # two warm up
    rows = split_by_rank(times)
    assert list(rows) == ["vision rank 0", "vision rank 1", "text rank 0", "text rank 1"]
    for row in rows.values():
        assert tuple(row) == KINDS and sum(row.values()) == pytest.approx(1.0 + 0.9 / 18)
        assert (row["data"], row["forward"], row["collective"]) == pytest.approx((0.1, 0.15, 0.01))
        assert row["waiting for others"] == pytest.approx(1.0 - 0.1 - 0.48)
    assert times.mean_s == pytest.approx(1.05)


def test_a_step_of_another_attempt_warms_up_too(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    with (run_dir / "events.jsonl").open("a") as file:
        file.write('{"event": "start", "step": 10, "time": 5.0}\n')
    times = times_of(read_run(run_dir))
    assert times is not None
    assert [one.step for one in times.steps] == [*range(3, 11), *range(13, 21)]


def test_pace_is_seconds_over_work_beside_the_median_rank(tmp_path: Path) -> None:
    def seconds(step: int) -> dict[str, dict[str, list[float]]]:
        return {"text": {"forward": [0.2, 0.4, 0.2, 0.3], "comm": [0.2, 0.0, 0.2, 0.1]}}

    work = {"text": [1.0, 2.0, 1.0, 0.0]}
    run_dir = make_run(tmp_path / "run", seconds=seconds, work=lambda step: work)
    times = times_of(read_run(run_dir))
    assert times is not None
    names, steps, pace = pace_rows(times)
    assert names[1] == "text rank 1" and steps[0] == 3
    assert pace[:3] == pytest.approx(np.ones((3, 18))) and np.isnan(pace[3]).all()  # it had nothing to do


def test_a_run_of_one_step_is_split_too(tmp_path: Path) -> None:
    times = times_of(read_run(make_run(tmp_path / "run", steps=1)))
    assert times is not None and len(times.step_s) == 1 and len(split_by_rank(times)) == 4


def test_without_lines_of_ranks_there_is_no_split(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    (run_dir / "ranks.jsonl").unlink()
    times = times_of(read_run(run_dir))
    assert times is not None and split_by_rank(times) == {}


def test_steps_in_another_layout_are_left_out_not_the_stage(tmp_path: Path) -> None:
    """As behind a restart with fewer devices; a step in which nothing was measured is left out too."""

    def seconds(step: int) -> dict[str, dict[str, list[float]]]:
        if step == 15:
            return healthy_ranks() | {"text": {}}
        three = {kind: [*of, of[0]] for kind, of in healthy_ranks()["text"].items()}
        return healthy_ranks() | ({"text": three} if step < 10 else {})

    times = times_of(read_run(make_run(tmp_path / "run", seconds=seconds, status=None)))
    assert times is not None
    assert times.stages["text"].own.shape == (10, 2) and times.stages["vision"].own.shape == (18, 2)
    assert 15 not in times.stages["text"].steps
    names, steps, pace = pace_rows(times)
    assert len(names) == 4 and np.isnan(pace[3, : steps.index(10)]).all() and np.isfinite(pace[3, -1])
    assert sum(split_by_rank(times)["text rank 1"].values()) == pytest.approx(1.0)


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


def test_hot_experts_have_a_row_a_layer(tmp_path: Path) -> None:
    record = read_run(make_run(tmp_path / "run"))
    load = {"hottest": {"0": 1.5, "3": 2.5}, "busiest": {"0": 1.0, "3": 1.25}}
    steps = [replace(one, expert_load=load if one.step % 2 else None) for one in record.steps]
    charts = {one.name: one for one in load_views(replace(record, steps=steps))}
    labels = {name: [one.text for one in chart.shapes if isinstance(one, Label)] for name, chart in charts.items()}
    assert labels["hottest_expert"][:2] == ["layer 0, mean 1.50", "layer 3, mean 2.50"]
    assert labels["busiest_expert"][:2] == ["layer 0, mean 1.00", "layer 3, mean 1.25"]


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


def test_before_them_stands_what_the_first_run_answered_untrained(tmp_path: Path) -> None:
    first = record_of(answered(tmp_path / "first", (0, "green"), (10, "red")))
    second = record_of(answered(tmp_path / "second", (0, "blue"), (5, "red")))
    text = answers_beside([first, second], [Gallery({})] * 2)
    assert "first before training" in text and "second before training" not in text and "blue" not in text
    assert text.index('class="other">green') < text.index('class="right">red')
    other = record_of(answered(tmp_path / "other", (5, "red"), asked="What?"))
    assert answers_beside([first, other], [Gallery({})] * 2) == ""


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
