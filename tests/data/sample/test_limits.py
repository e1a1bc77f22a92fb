"""Samples that are too long."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

from dhp.core.batch import PositionRange
from dhp.core.errors import DataError
from dhp.data.sample.lengths import Length, check_characters, check_length, longest_token


def test_what_fits_passes() -> None:
    check_length(Length(vision=90, text=100), None, None)
    check_length(Length(90, 100), 100, PositionRange(100, of_pictures=True))
    check_length(Length(90, 100), None, PositionRange(10, of_pictures=False))


@pytest.mark.parametrize(
    ("most", "positions", "told"),
    [
        (99, None, r"100 tokens \(90 of images and videos\) are more than data.max_tokens=99"),
        (None, PositionRange(99, True), r"100 tokens are more than the 99 positions .* data.max_tokens=99 with"),
        (None, PositionRange(9, False), "10 tokens beside 90 of images and videos are more than the 9 positions"),
    ],
)
def test_what_does_not_is_told(most: int | None, positions: PositionRange | None, told: str) -> None:
    with pytest.raises(DataError, match=told):
        check_length(Length(90, 100), most, positions)


def tokenizer(model=None, normalizer=None, before=None, added=()) -> dict:
    vocab = {letter: number for number, letter in enumerate([*"abĠe", "ab", "aba"])}
    made = Tokenizer(model or models.BPE(vocab, [("a", "b"), ("ab", "a")]))
    made.pre_tokenizer = before or pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        made.normalizer = normalizer
    made.add_special_tokens(list(added))
    return json.loads(made.to_str())


@pytest.mark.parametrize(
    ("backend", "longest"),
    [
        (tokenizer(), 3),
        (tokenizer(normalizer=normalizers.NFC()), 3),
        (tokenizer(added=["<|image_pad|>"]), 13),
        (tokenizer(normalizer=normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "▁")])), 3),
        (tokenizer(normalizer=normalizers.Replace("  ", " ")), None),
        (tokenizer(normalizer=normalizers.NFKC()), None),
        (tokenizer(normalizer=normalizers.Strip()), None),
        (tokenizer(before=pre_tokenizers.Whitespace()), None),
        (tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]")), None),
        (tokenizer(models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")), None),
    ],
)
def test_the_longest_token_where_there_is_one(backend: dict, longest: int | None) -> None:
    assert longest_token(backend) == longest


def test_a_token_that_takes_space_along_has_no_bound() -> None:
    backend = tokenizer(added=["<x>"])
    backend["added_tokens"][0]["lstrip"] = True
    assert longest_token(backend) is None


@pytest.mark.parametrize(
    ("text", "pictures", "longest", "most", "positions"),
    [
        ("aba" * 10, 0, 3, 10, None),
        ("aba" * 12, 2, 3, 10, None),
        ("aba" * 10, 0, 3, None, PositionRange(10, True)),
        ("aba" * 11, 0, 3, None, None),
        ("aba" * 11, 0, None, 10, None),
        ("e\u0301" * 30, 0, 3, 10, None),  # one character each in normal form C
    ],
)
def test_a_text_that_may_fit_passes(text, pictures, longest, most, positions) -> None:
    check_characters(text, pictures, longest, most, positions)


@pytest.mark.parametrize(
    ("most", "positions", "named"),
    [
        (10, None, "10 tokens \\(data.max_tokens\\)"),
        (None, PositionRange(10, False), "10 tokens \\(the positions that the model knows\\)"),
        (11, PositionRange(10, True), "10 tokens \\(the pos"),
    ],
)
def test_a_text_that_cannot_fit_is_refused(most, positions, named) -> None:
    with pytest.raises(DataError, match=f"31 characters are more than {named}"):
        check_characters("a" * 31, 0, 3, most, positions)
