"""docs/first-model.md: each of its commands, from top to bottom, in a new folder; and what the page says of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers import forks, shared_ray

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "first-model.md").read_text(encoding="utf-8")
LIMIT_S = 600
# A command that starts actors joins the Ray that tests share, and its process is a fork of one with the imports done.
COMMAND = """\
#!/bin/sh
case "$1" in
    train|evaluate|generate) exec "{python}" -m dhp "$@" cluster.address={address} cluster.threads_per_actor=1 ;;
    *) exec "{python}" -m dhp "$@" ;;
esac
"""


def blocks() -> list[tuple[str, str]]:
    """Language and text of each fenced block."""
    return re.findall(r"```(\w*)\n(.*?)```", PAGE, re.DOTALL)


def sentences(images: str, printed: str) -> tuple[float, float]:
    """Loss and accuracy of a line of `evaluate loss exchange=images`."""
    found = re.search(rf"held_out +{images} images +loss ([\d.]+)  accuracy ([\d.]+)%", printed)
    assert found is not None, printed
    return float(found[1]), float(found[2])


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """The folder in which the page was followed, and what each line of shell printed."""
    folder, programs = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("bin")
    address, joining = shared_ray.join()
    (programs / "dhp").write_text(COMMAND.format(python=sys.executable, address=address))
    (programs / "dhp").chmod(0o755)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, **forks.environment(), **joining, "PATH": path}
    environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"], str(ROOT)])
    printed = {}
    for language, text in blocks():
        name = re.match(r"# (\S+)\n", text)
        if language in ("python", "yaml") and name is not None:
            (folder / name[1]).write_text(text, encoding="utf-8")
        for line in text.splitlines() if language == "sh" else ():
            words = ["bash", "-c", line]
            done = subprocess.run(
                words, cwd=folder, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
            )
            assert done.returncode == 0, f"{line}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
            printed[line] = done.stdout
    return folder, printed


def shown(followed: tuple[Path, dict[str, str]], beginning: str) -> str:
    (found,) = [text for line, text in followed[1].items() if line.startswith(beginning)]
    return found


def test_every_block_is_followed() -> None:
    """Blocks are shell, files with their name on the first line, or the JSON that is shown."""
    for language, text in blocks():
        assert language in ("sh", "json") or re.match(r"# \S+\.(py|yaml)\n", text), text[:80]
    files = re.findall(r"```\w+\n# (\S+)\n", PAGE)
    assert files == ["make_pictures.py", "first.yaml", "ask.py"]


def test_the_sample_that_is_shown_is_the_first(followed: tuple[Path, dict[str, str]]) -> None:
    (sample,) = [json.loads(text) for language, text in blocks() if language == "json"]
    assert json.loads((followed[0] / "train.jsonl").read_text().splitlines()[0]) == sample


def test_inspect_shows_what_is_learned(followed: tuple[Path, dict[str, str]]) -> None:
    told = shown(followed, "dhp inspect sample")
    assert "⟦The circle is yellow." in told and "<image> × 16" in told
    assert "192" in shown(followed, "dhp inspect data")


def test_it_learns_and_its_table_says_what_comes_next(followed: tuple[Path, dict[str, str]]) -> None:
    told = shown(followed, "dhp train")
    summary = json.loads((followed[0] / "runs" / "first" / "summary.json").read_text())
    assert summary["status"] == "completed" and summary["last_loss"] < summary["first_loss"] - 2
    assert summary["eval_accuracy"]["held_out"] > 0.95
    rows = [line.split()[0] for line in told.split("\n\nstatus")[1].splitlines()]
    assert {"held", "curves", "export", "ask"} <= set(rows)


def test_held_out_questions_are_answered(followed: tuple[Path, dict[str, str]]) -> None:
    lines = [json.loads(line) for line in (followed[0] / "answers.jsonl").read_text().splitlines()]
    exact = sum(line["exact"] for line in lines)
    assert len(lines) == 48 and exact >= 40
    assert f"{exact} of 48 answers are exact" in shown(followed, "dhp generate checkpoint=runs/first dataset")


def test_with_pictures_of_others_it_answers_worse(followed: tuple[Path, dict[str, str]]) -> None:
    told = shown(followed, "dhp evaluate loss")
    (own_loss, own), (others_loss, others) = sentences("own", told), sentences("others", told)
    assert own > 95 and others < 92 and others_loss > own_loss + 0.3
    rows = re.findall(r"^\| (own|others) \| ([\d.]+) \| ([\d.]+)% \|$", PAGE, re.MULTILINE)
    for images, loss, accuracy in rows:  # of the page: another machine's sums are rounded otherwise
        found = sentences(images, told)
        assert found == pytest.approx((float(loss), float(accuracy)), rel=0.1, abs=0.05)
    assert [row[0] for row in rows] == ["own", "others"]


def test_plain_transformers_give_the_same_tokens(followed: tuple[Path, dict[str, str]]) -> None:
    answer = json.loads((followed[0] / "answer.json").read_text())
    ids, text = re.fullmatch(r"(\[.*\]) (.*)\n", shown(followed, "python ask.py")).groups()
    assert json.loads(ids) == answer["token_ids"] and len(answer["token_ids"]) > 5
    assert text.strip() == answer["text"].removesuffix("<|im_end|>").strip()
    held_out = json.loads((followed[0] / "held_out.jsonl").read_text().splitlines()[0])
    assert text.strip() == held_out["conversations"][1]["value"]
