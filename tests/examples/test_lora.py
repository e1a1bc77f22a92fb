"""The walk of examples/lora: its commands in order, in few steps, and as they stand."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from examples.lora.pictures import COLOURS, RADII, make_sample
from tests.helpers.pages import Followed, copy_examples, follow
from tests.helpers.runs import ROOT

PAGE = (ROOT / "examples" / "lora" / "README.md").read_text(encoding="utf-8")
HELD_OUT = 48
SHORT = {"dhp train": "training.max_steps=4 training.eval_steps=2 training.save_steps=2 training.log_interval=1"}


def followed(folder: Path, more: Mapping[str, str] | None = None) -> Followed:
    """The page, in a copy of the examples below `folder`. more: see `follow`."""
    return follow(PAGE, copy_examples(folder) / "lora", folder, more)


def check(found: Followed, steps: int, best: int) -> None:
    """What holds however well the model learned. best: the step of the lowest held-out loss."""
    run_dir = found.folder / "runs" / "lora"
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["steps"]) == ("completed", steps)
    assert summary["last_loss"] < summary["first_loss"]
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if line["kind"] == "eval"}
    assert len(losses) >= 2 and best == max(losses) == min(losses, key=losses.__getitem__)
    assert f"step_{best}: eval_loss" in found.shown("dhp train")
    assert [line["number"] for line in lines if line["kind"] == "answer"] == [1, 2, 3, 4] * len(losses)
    page = (run_dir / "report.html").read_text()
    assert "held_out" in page
    adapter = json.loads((found.folder / "exported" / "adapter" / "adapter_config.json").read_text())
    assert adapter["r"] in (8, 16) and {8, 16} == {adapter["r"], *adapter["rank_pattern"].values()}
    compared = found.shown("python compare.py")
    assert compared.endswith(f"{HELD_OUT} of {HELD_OUT} answers of plain transformers are those of dhp\n")


@pytest.mark.slow
def test_its_commands_work(tmp_path: Path) -> None:
    check(followed(tmp_path, SHORT), steps=4, best=4)


@pytest.mark.slow
def test_it_learns_what_is_asked(tmp_path: Path) -> None:
    found = followed(tmp_path)
    check(found, steps=96, best=96)
    lines = [json.loads(line) for line in (found.folder / "answers.jsonl").read_text().splitlines()]
    exact = sum(line["exact"] for line in lines)
    assert len(lines) == HELD_OUT and exact >= 44
    assert f"{exact} of {HELD_OUT} answers are exact" in found.shown("dhp generate")


def test_a_picture_has_what_its_answer_says(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    answers = {make_sample(tmp_path, f"{number}.png")["conversations"][1]["value"] for number in range(60)}
    assert answers == {f"The circle is {told}." for told in (*COLOURS, *RADII)}
