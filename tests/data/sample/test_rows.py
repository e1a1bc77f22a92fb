"""Rows of other projects: read as they are meant, or refused by what they are; never something else in silence."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dhp.core.errors import DataError
from dhp.data.read.annotations import read_annotations
from tests.data.rows import ROWS
from tests.data.rows.outcome import make_media, make_readers, verdict
from tests.data.rows.table import HEADING, table

PAGE = Path(__file__).resolve().parents[3] / "docs" / "reference" / "formats.md"
BY_CASE = {row.case: row for row in ROWS}


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    make_media(folder)
    return folder.resolve()


@pytest.fixture(scope="session")
def readers(tokenizer):
    return make_readers(tokenizer)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.case)
def test_a_row_is_read_as_it_is_meant_or_refused(row, folder, readers):
    outcome, words = verdict(row, folder, readers)
    assert outcome == ("refused" if row.refused else "read"), words


@pytest.mark.parametrize(
    ("case", "changes", "wrong"),
    [
        ("case_000_mllm", {"says": ("user: <blue>What colour is the wall?", "assistant: It is red.")}, "pictures are"),
        ("case_036_two_images", {"says": ("user: <blue>Left, <green>right?", "assistant: It is red.")}, "pictures are"),
        ("case_018_system_beside", {"says": ("user: What colour is the wall?", "assistant: It is red.")}, "text"),
        ("case_004_identity", {"says": ("user: What colour is the wall?", "unlearned: It is red.")}, "learned is"),
        ("case_110_frames", {"grids": ((1, 4, 4),)}, "grids are"),
        ("case_061_channel", {"unread": ()}, "not read are"),
        ("case_004_identity", {"refused": "anything"}, "accepted"),
        ("case_054_template_kwargs", {"refused": "another reason"}, "refused in other words"),
    ],
)
def test_what_is_not_as_the_row_says_is_seen(case, changes, wrong, folder, readers):
    outcome, words = verdict(replace(BY_CASE[case], **changes), folder, readers)
    assert outcome == "silent" and words.startswith(wrong)


def test_there_are_enough_rows_each_once():
    assert len(BY_CASE) == len(ROWS) >= 140


def test_the_page_holds_the_table(folder, readers):
    written = PAGE.read_text(encoding="utf-8")
    assert written[written.index(HEADING) :] == table(ROWS, folder, readers), (
        "run `python -m tests.data.rows` and paste it"
    )


def test_a_turn_of_lists_is_a_list_of_turns(tmp_path):
    """As `datasets` has a Sequence of them; an empty system turn leaves the place to the template's own."""
    turned = {"from": ["system", "human", "gpt"], "value": ["", "What?", "A."]}
    (tmp_path / "a.json").write_text(json.dumps([{"conversations": turned}]))
    record = read_annotations("set", tmp_path / "a.json", None).record(0)
    assert [(turn.role, turn.parts) for turn in record.turns] == [("user", ("What?",)), ("assistant", ("A.",))]


def test_a_file_separated_by_semicolons_is_told(tmp_path):
    (tmp_path / "a.csv").write_text("query;response\nWhat?;A.\n")
    with pytest.raises(DataError, match="the one column is 'query;response': the file is separated by semicolons"):
        read_annotations("set", tmp_path / "a.csv", None).record(0)
