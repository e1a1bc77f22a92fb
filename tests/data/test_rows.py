"""Rows of other projects: read as they are meant, or refused by what they are; never something else in silence."""

from __future__ import annotations

import copy

import pytest

from tests.data.rows import ROWS
from tests.data.rows.outcome import make_media, thinking_template, verdict


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rows")
    make_media(folder)
    return folder.resolve()


@pytest.fixture(scope="session")
def thinking(tokenizer):
    own = copy.deepcopy(tokenizer)
    own.chat_template = thinking_template(own.chat_template)
    return own


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.case)
def test_a_row_is_read_as_it_is_meant_or_refused(row, folder, preprocessor, tokenizer, thinking):
    own = thinking if row.thinks else tokenizer
    assert verdict(row, folder, preprocessor(tokenizer=own), own) == ("refused" if row.refused else "read")


def test_there_are_enough_rows_each_once():
    cases = [row.case for row in ROWS]
    assert len(set(cases)) == len(cases) >= 140
