"""docs/first-model.md: each of its commands, from top to bottom, in a new folder; and what the page says of them."""

import json
import re
from pathlib import Path

import pytest

from tests.helpers.pages import Followed, blocks, follow

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "first-model.md").read_text(encoding="utf-8")


def sentences(images: str, printed: str) -> tuple[float, float]:
    """Loss and accuracy of a line of `evaluate loss exchange=images`."""
    found = re.search(rf"held_out +{images} images +loss ([\d.]+)  accuracy ([\d.]+)%", printed)
    assert found is not None, printed
    return float(found[1]), float(found[2])


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Followed:
    """The page, followed in a new folder."""
    return follow(PAGE, tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("bin"))


def test_every_block_is_followed() -> None:
    """Blocks are shell, files with their name on the first line, or the JSON that is shown."""
    for language, text in blocks(PAGE):
        assert language in ("sh", "json") or re.match(r"# \S+\.(py|yaml)\n", text), text[:80]
    files = re.findall(r"```\w+\n# (\S+)\n", PAGE)
    assert files == ["make_pictures.py", "first.yaml", "ask.py"]


@pytest.mark.slow
def test_the_sample_that_is_shown_is_the_first(followed: Followed) -> None:
    (sample,) = [json.loads(text) for language, text in blocks(PAGE) if language == "json"]
    assert json.loads((followed.folder / "train.jsonl").read_text().splitlines()[0]) == sample


@pytest.mark.slow
def test_inspect_shows_what_is_learned(followed: Followed) -> None:
    told = followed.shown("dhp inspect sample")
    assert "⟦The circle is yellow." in told and "<image> × 16" in told
    assert "192" in followed.shown("dhp inspect data")


@pytest.mark.slow
def test_it_learns_and_its_table_says_what_comes_next(followed: Followed) -> None:
    told = followed.shown("dhp train")
    summary = json.loads((followed.folder / "runs" / "first" / "summary.json").read_text())
    assert summary["status"] == "completed" and summary["last_loss"] < summary["first_loss"] - 2
    assert summary["eval_accuracy"]["held_out"] > 0.95
    rows = [line.split()[0] for line in told.split("\n\nstatus")[1].splitlines()]
    assert {"held", "curves", "export", "ask"} <= set(rows)


@pytest.mark.slow
def test_held_out_questions_are_answered(followed: Followed) -> None:
    lines = [json.loads(line) for line in (followed.folder / "answers.jsonl").read_text().splitlines()]
    exact = sum(line["exact"] for line in lines)
    assert len(lines) == 48 and exact >= 40
    assert f"{exact} of 48 answers are exact" in followed.shown("dhp generate checkpoint=runs/first dataset")


@pytest.mark.slow
def test_with_pictures_of_others_it_answers_worse(followed: Followed) -> None:
    told = followed.shown("dhp evaluate loss")
    (own_loss, own), (others_loss, others) = sentences("own", told), sentences("others", told)
    assert own > 95 and others < 92 and others_loss > own_loss + 0.3
    rows = re.findall(r"^\| (own|others) \| ([\d.]+) \| ([\d.]+)% \|$", PAGE, re.MULTILINE)
    for images, loss, accuracy in rows:  # of the page: another machine's sums are rounded otherwise
        found = sentences(images, told)
        assert found == pytest.approx((float(loss), float(accuracy)), rel=0.1, abs=0.05)
    assert [row[0] for row in rows] == ["own", "others"]


@pytest.mark.slow
def test_plain_transformers_give_the_same_tokens(followed: Followed) -> None:
    answer = json.loads((followed.folder / "answer.json").read_text())
    ids, text = re.fullmatch(r"(\[.*\]) (.*)\n", followed.shown("python ask.py")).groups()
    assert json.loads(ids) == answer["token_ids"] and len(answer["token_ids"]) > 5
    assert text.strip() == answer["text"].removesuffix("<|im_end|>").strip()
    held_out = json.loads((followed.folder / "held_out.jsonl").read_text().splitlines()[0])
    assert text.strip() == held_out["conversations"][1]["value"]
