"""Samples of preferences: tokens of both sides, pictures of both once, references by row."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dhp.core.errors import ConfigError, DataError
from dhp.core.preferences import PAIRS, SINGLES, Mark
from dhp.data.read.annotations import Annotations, read_annotations
from dhp.data.sample.preprocess import Preprocessor
from dhp.data.sampling.references import ReferenceTable

PAIR = {"prompt": "What is it?", "chosen": "A red circle.", "rejected": "A square.", "images": ["a.png"]}
TURNS = [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "Red."}]
APART = {"messages": TURNS, "images": ["a.png"], "rejected_response": "No.", "rejected_images": ["b.jpg"]}
PARTS = [{"role": "assistant", "content": [{"type": "text", "text": "Red."}]}]


@pytest.fixture
def read(images: Path, write_json: Callable[..., Path]) -> Callable[..., Annotations]:
    return lambda *rows, compares=PAIRS: read_annotations("set", write_json(list(rows)), images, compares=compares)


Read = Callable[..., Annotations]
Make = Callable[..., Preprocessor]


def test_both_sides_are_samples_and_a_picture_is_decoded_once(read: Read, preprocessor: Make) -> None:
    make = preprocessor()
    pair = make(read(PAIR).record(0))
    assert pair.sides is not None
    first, second = pair.sides
    assert (first.again, second.again, len(first.pixels), len(second.pixels)) == (False, True, 1, 0)
    assert first.grids == second.grids == pair.grids and len(pair.pixels) == 1
    for side, mark in zip(pair.sides, (Mark(1, math.nan), Mark(-1, math.nan, False)), strict=True):
        assert side.mark is not None and (side.mark.side, side.mark.first) == (mark.side, mark.first)
    for side, answer in ((first, "chosen"), (second, "rejected")):
        alone = make(
            read({"query": PAIR["prompt"], "response": PAIR[answer], "images": ["a.png"]}, compares="").record(0)
        )
        assert np.array_equal(side.input_ids, alone.input_ids) and np.array_equal(side.labels, alone.labels)
    assert np.array_equal(pair.input_ids, np.concatenate([first.input_ids, second.input_ids]))


def test_its_length_is_that_of_both_with_what_both_show_once(read: Read, preprocessor: Make) -> None:
    make = preprocessor()
    for row in (PAIR, APART):
        record = read(row).record(0)
        pair, length = make(record), make.measure(record)
        assert length.text == len(pair.input_ids)
        assert (length.pictures, length.patches) == (len(pair.pixels), sum(map(len, pair.pixels)))
        assert length.targets == sum(side.target_tokens for side in pair.sides or ())
        assert length.pairs == sum(len(side.input_ids) ** 2 for side in pair.sides or ()) < length.text**2
    assert len(pair.pixels) == 2 and pair.sides is not None and not pair.sides[1].again


def test_a_single_answer_has_the_next_rows_beside_it(read: Read, preprocessor: Make) -> None:
    rows = [
        {"query": "What is it?", "response": "A circle.", "label": False},
        {"query": "Who?", "response": "Nobody.", "label": True},
    ]
    pair = preprocessor()(read(*rows, compares=SINGLES).record(0))
    assert pair.sides is not None
    marks = [side.mark for side in pair.sides]
    assert [mark and (mark.side, mark.first) for mark in marks] == [(-1, True), (0, False)]


@pytest.mark.parametrize(
    ("row", "more", "message"),
    [
        (PAIR, {"max_tokens": 60}, "tokens of both sides are more than data.max_tokens=60, and both stand in one row"),
        ({"chosen": TURNS, "rejected": TURNS[:1] + PARTS}, {}, "both sides are the same tokens"),
    ],
)
def test_a_pair_that_cannot_be_used(row: Any, more: Any, message: str, read: Read, preprocessor: Make) -> None:
    make, record = preprocessor(**more), read(row).record(0)
    with pytest.raises(DataError, match=message):
        make(record)


def test_references_are_those_of_its_row(read: Read, preprocessor: Make, tmp_path: Path) -> None:
    make, annotations = preprocessor(), read(PAIR, PAIR | {"chosen": "Red."}, PAIR | {"chosen": "Blue."})
    table = ReferenceTable(tmp_path, "model", {"set": annotations}, make)
    assert table.missing() == ["set"]
    with pytest.raises(DataError, match="no log-probabilities of the reference are in"):
        table(annotations.record(0))
    table.keep("set", {0: (-1.0, -2.0), 2: (-3.0, -4.5)})
    assert table.missing() == [] and table(annotations.record(2)) == (-3.0, -4.5)
    make.references = table
    pair = make(annotations.record(2))
    assert [side.mark and side.mark.reference for side in pair.sides or ()] == [-3.0, -4.5]
    with pytest.raises(DataError, match="the reference has no log-probability of this sample"):
        make(annotations.record(1))
    assert ReferenceTable(tmp_path, "another model", {"set": annotations}, make).missing() == ["set"]


def test_a_damaged_table_is_computed_again(read: Read, preprocessor: Make, tmp_path: Path) -> None:
    table = ReferenceTable(tmp_path, "model", {"set": read(PAIR)}, preprocessor())
    table.keep("set", {0: (-1.0, -2.0)})
    (file,) = tmp_path.glob("*.npy")
    file.write_bytes(file.read_bytes()[:-8])
    assert table.missing() == ["set"]
    (tmp_path / "closed").write_text(json.dumps({}))
    with pytest.raises(ConfigError, match=r"cannot be kept in .*closed.* Set data\.cache_dir"):
        ReferenceTable(tmp_path / "closed", "model", {"set": read(PAIR)}, preprocessor()).keep("set", {})
