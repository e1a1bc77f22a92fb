"""The page as a whole: parts in order, nothing from elsewhere, small enough, several runs side by side."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from PIL import Image

from dhp.core.errors import RecordError
from dhp.report.page import drawings, write_report
from dhp.report.run_record import read_run
from tests.helpers.made_runs import make_run

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
