"""Plain text: all of it learned, cut where a row ends, and no conversation."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from dhp.core.batch import IGNORED
from dhp.core.errors import DataError
from dhp.data.media.sources import MediaResolver
from dhp.data.read.annotations import detect, parse_record
from dhp.data.read.records import Record
from dhp.data.sample.tokens import Prompts
from tests.data.sample.made import make_preprocessor

WALLS = "Walls are painted red, green or blue. " * 20


def written(raw: Any) -> Record:
    return parse_record(raw, "books", 1, "books: row 1", "text", MediaResolver(None))


def test_all_tokens_are_learned_up_to_the_end_token(tokenizer) -> None:
    sample = make_preprocessor(tokenizer, prompts=Prompts("A system text."))(written({"text": WALLS}))
    assert tokenizer.decode(sample.input_ids) == WALLS + tokenizer.eos_token
    assert sample.labels.tolist() == sample.input_ids.tolist() and IGNORED not in sample.labels
    assert sample.target_tokens == len(sample.input_ids) - 1 and not sample.mm_token_type_ids.any()


@pytest.mark.parametrize("most", [1, 7, 30])
def test_a_row_is_cut_at_max_tokens(tokenizer, most: int) -> None:
    record = written({"text": WALLS * 100})
    whole = make_preprocessor(tokenizer)(record).input_ids
    reader = make_preprocessor(tokenizer, max_tokens=most)
    if most == 1:  # which nothing predicts
        with pytest.raises(DataError, match="no target token"):
            reader(record)
        return
    assert reader(record).input_ids.tolist() == whole[:most].tolist()
    assert reader.measure(record).text == most


def test_a_tokenizer_that_ends_texts_itself_ends_them_once(tokenizer) -> None:
    ended = deepcopy(tokenizer)
    sample = make_preprocessor(ended)(written({"text": f"Walls.{ended.eos_token}"}))
    assert sample.input_ids.tolist().count(ended.eos_token_id) == 1


@pytest.mark.parametrize(
    ("raw", "told"),
    [
        ({"text": " "}, "'text' is empty"),
        ({"text": 3}, "'text' must be a string"),
        ({"content": "a"}, "key 'text' is missing"),
        ({"text": "a", "image": "a.png"}, "'image'"),
        ({"text": "a", "messages": [{"role": "user", "content": "b"}]}, "'messages'"),
        ({"text": "bad", "label": 0}, "'label'"),
        ({"text": "half \ud800"}, "half a character"),
    ],
)
def test_what_is_no_plain_text_is_refused(raw: Any, told: str) -> None:
    with pytest.raises(DataError, match=told):
        written(raw)


def test_a_placeholder_in_the_text_is_refused(tokenizer) -> None:
    with pytest.raises(DataError, match="1 image placeholder tokens for 0 images"):
        make_preprocessor(tokenizer)(written({"text": "a <|image_pad|> b"}))


def test_it_is_never_guessed_and_asks_for_nothing() -> None:
    assert detect([{"text": "a"}]) == "unknown"
    record = written({"text": "a", "id": 4})
    assert not record.asks and record.written == "a" and record.unread == ()
    with pytest.raises(DataError, match="no answer of it is learned"):
        record.up_to_answer()
