"""examples/easy_vqa: its data and counts, and its quick form as a user runs it."""

import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

from tests.helpers.runs import ROOT

FOLDER = ROOT / "examples" / "easy_vqa"
PACKAGES = Path(sys.prefix) / "examples"  # where `make` installs them
QUICK_EXACT = 0.8  # of the colours that the quick form is asked for


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModuleType]:
    """The example's modules, which stand beside each other and in no package."""
    monkeypatch.syspath_prepend(str(FOLDER))
    names = ("prepare", "measure")
    found = {name: import_module(name) for name in names}
    for name in names:
        monkeypatch.delitem(sys.modules, name)
    return found


@pytest.mark.parametrize(
    ("question", "kind"),
    [
        ("what color is the shape?", "which colour"),
        ("what is the color of the triangle?", "which colour"),
        ("what is the blue shape?", "which shape"),
        ("what shape does the image contain?", "which shape"),
        ("is there a teal shape?", "yes or no: colour"),
        ("does the image contain a circle?", "yes or no: shape"),
        ("is no brown shape present?", "negated, yes or no: colour"),
        ("does the image not contain a rectangle?", "negated, yes or no: shape"),
    ],
)
def test_questions_are_told_apart(question: str, kind: str, scripts: dict[str, ModuleType]) -> None:
    assert scripts["measure"].kind_of(question) == kind


def asked(question: str, answer: str) -> dict:
    return {"conversations": [{"value": f"<image>\n{question}"}, {"value": answer}]}


def test_guessing_takes_each_questions_commonest_training_answer(scripts: dict[str, ModuleType]) -> None:
    train = [asked("what shape?", "circle"), asked("what shape?", "circle"), asked("what shape?", "square")]
    test = [
        asked("what shape?", "circle"),
        asked("what shape?", "square"),
        asked("is it?", "no"),
        asked("is it?", "yes"),
    ]
    assert scripts["measure"].guess(train, test) == 2 / 4  # of a question never asked before: yes


def test_a_table_has_each_kind_with_its_picture_and_with_anothers(scripts: dict[str, ModuleType]) -> None:
    rows = {"test": [asked("what shape is present?", "circle"), asked("is there a red shape?", "no")]}
    samples = [
        {"dataset": "test", "row": row, "exact": exact, "images": images}
        for images, row, exact in (("own", 0, True), ("own", 1, False), ("others", 0, False), ("others", 1, False))
    ]
    assert scripts["measure"].table(samples, rows) == [
        ("which shape", 1, 1.0, 0.0), ("yes or no: colour", 1, 0.0, 0.0), ("all", 2, 0.5, 0.0)
    ]  # fmt: skip


def test_a_package_that_is_missing_or_another_is_named(tmp_path: Path, scripts: dict[str, ModuleType]) -> None:
    pins, check = tmp_path / "pins.txt", scripts["prepare"].check_packages
    pins.write_text("pytest==0.1  # another\n")
    with pytest.raises(SystemExit, match=r"pytest is .* here, and this example was tried with 0\.1\. Install that: "):
        check(pins)
    pins.write_text("# a comment\nno-such-package==1.0\n")
    with pytest.raises(SystemExit, match=r"no-such-package is not installed, .* 1\.0\. Install it: make example"):
        check(pins)


def test_a_disk_without_room_is_named(tmp_path: Path, scripts: dict[str, ModuleType]) -> None:
    with pytest.raises(SystemExit, match=r"GiB free, and models, checkpoints and exports take"):
        scripts["prepare"].check_room(tmp_path, 1 << 60)


def test_what_is_interrupted_leaves_nothing(tmp_path: Path, scripts: dict[str, ModuleType]) -> None:
    made_whole = scripts["prepare"].made_whole
    with pytest.raises(KeyboardInterrupt), made_whole(tmp_path / "out") as folder:
        (folder / "half").write_text("")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with made_whole(tmp_path / "out") as folder:
        (folder / "whole").write_text("")
    assert [one.name for one in (tmp_path / "out").iterdir()] == ["whole"]


@pytest.mark.example
def test_the_quick_form_learns_to_see_colours(tmp_path: Path) -> None:
    """Exact answers, that they need the picture, and the same ones from plain transformers; the same command again
    makes nothing twice."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(PACKAGES), str(ROOT)))}
    words = [sys.executable, str(FOLDER / "run.py"), str(tmp_path), "--quick"]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    samples = (tmp_path / "quick" / "runs" / "easy_vqa" / "samples.jsonl").read_text().splitlines()
    exact: dict[str, list[bool]] = {"own": [], "others": []}
    for line in map(json.loads, samples):
        exact[line["images"]].append(line["exact"])
    own, others = (sum(of) / len(of) for of in exact.values())
    assert own >= QUICK_EXACT and others <= 0.5, (own, others)
    assert f"of {len(exact['own'])} dhp's evaluation says the same" in done.stdout
    again = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "nothing is left to train" in again.stdout and "making " not in again.stdout
