from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from dhp.config.data import DatasetEntry
from dhp.core.errors import DataError
from dhp.data.media.images import open_image
from dhp.data.sampling.dataset import open_dataset
from dhp.tiny import made_pictures
from dhp.tiny.made_pictures import PALETTE, make_dataset, texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_dataset(tmp_path_factory.mktemp("made") / "shapes", samples=64, seed=3)


@pytest.fixture(scope="module")
def records(folder):
    entry = DatasetEntry(annotation_path=str(folder / "annotations.json"), data_path=str(folder))
    dataset = open_dataset(["shapes"], {"shapes": entry})
    return [dataset.record(index) for index in range(len(dataset))]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_mix_of_samples(records):
    assert Counter(len(record.images) for record in records) == {0: 8, 1: 48, 2: 8}
    assert Counter(len(record.turns) > 2 for record in records) == {False: 56, True: 8}


def test_pictures_are_real_files_of_many_sizes(records):
    paths = [path for record in records for path in record.images]
    assert {path.suffix for path in paths} == {".jpg", ".png"}
    formats = set()
    for path in paths:
        with Image.open(path) as image:
            formats.add(image.format)
    assert formats == {"JPEG", "PNG"}
    sizes = {open_image(path).size for path in paths}
    assert len(sizes) > 40
    assert all(56 <= side <= 168 for size in sizes for side in size)


def test_one_question_has_many_answers(records):
    """So that no answer can be known without its picture."""
    answers: dict[str, set[str]] = {}
    for record in records:
        for question, answer in zip(record.turns[::2], record.turns[1::2]):
            answers.setdefault(question.parts[-1], set()).add(answer.parts[0])
    for question in ("Which digit is this?", "How many shapes are there?", "Which bar is the tallest?"):
        assert len(answers[question]) >= 3
    assert max(len(answer.split()) for several in answers.values() for answer in several) <= 3


def test_the_colour_of_the_answer_is_in_the_picture(records):
    for record in records[0::8]:  # "What colour is the …?"
        image = open_image(record.images[0])
        wanted = PALETTE[record.turns[1].parts[0]]
        close = [all(abs(a - b) < 12 for a, b in zip(pixel, wanted)) for _, pixel in image.getcolors(1 << 20)]
        assert any(close)


def test_the_same_arguments_give_the_same_files(folder, tmp_path):
    assert files(make_dataset(tmp_path / "a" / "again", samples=64, seed=3)) == files(folder)
    other = files(make_dataset(tmp_path / "other", samples=64, seed=4))
    assert other["annotations.json"] != files(folder)["annotations.json"]


def test_a_made_folder_is_left_alone(folder):
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert make_dataset(folder, samples=64, seed=3) == folder
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before


def test_another_recipe_in_the_folder_is_an_error(folder, tmp_path):
    with pytest.raises(DataError, match=r"was not made with .*'samples': 65.*Remove it"):
        make_dataset(folder, samples=65, seed=3)
    with pytest.raises(DataError, match=r"it says None"):
        make_dataset(tmp_path, samples=8)


def test_an_interrupted_run_leaves_nothing(tmp_path, monkeypatch):
    def stop(random):
        raise KeyboardInterrupt

    monkeypatch.setattr(made_pictures, "KINDS", (made_pictures.KINDS[0], stop))
    with pytest.raises(KeyboardInterrupt):
        make_dataset(tmp_path / "shapes", samples=4)
    assert list(tmp_path.iterdir()) == []


def test_two_makers_at_once_end_with_one_dataset(tmp_path, monkeypatch):
    target = tmp_path / "shapes"
    rename = os.rename

    def late(source, destination):
        monkeypatch.setattr(os, "rename", rename)
        make_dataset(target, samples=8)  # the other maker finishes first
        rename(source, destination)

    monkeypatch.setattr(os, "rename", late)
    assert make_dataset(target, samples=8) == target
    assert [path.name for path in tmp_path.iterdir()] == ["shapes"]


def test_texts_are_all_questions_and_answers(folder):
    annotations = json.loads((folder / "annotations.json").read_text())
    assert len(texts(folder)) == sum(len(sample["conversations"]) for sample in annotations)
    assert "Which digit is this?" in [text.removeprefix("<image>\n") for text in texts(folder)]
