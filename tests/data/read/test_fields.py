"""Keys that a reader took, and what is left of a row."""

from __future__ import annotations

import pytest

from dhp.core.errors import DataError
from dhp.data.read.records import PART, TURN, Fields, check_left, is_set


def test_asking_takes_a_key_and_looking_does_not():
    row = Fields({"a": 1, "b": 2, "c": 3, "d": None, "e": {"x": None}})
    turn = row.within({"f": 4, "g": 5}, TURN, "turn 1", "'f'")
    assert row["a"] == 1 and row.get("nothing") is None and turn.get("f") == 4
    assert "b" in row and row.peek("b") == 2 and row.has("b", "d") and sorted(row) == ["a", "b", "c", "d", "e"]
    assert [(fields.level, key, value) for fields, key, value in row.left()] == [
        ("", "b", 2),
        ("", "c", 3),
        ("turn", "g", 5),
    ]


def test_the_first_key_that_is_set_is_meant():
    row = Fields({"b": None, "c": 0, "d": 1})
    assert row.first("a", "b", "c", "d") == "c" and row.first("a", "b") == "b" and row.first("a") is None


def test_what_is_no_object_is_named():
    with pytest.raises(DataError, match="turn 3 must be an object with 'role', got list"):
        Fields({}).within([], TURN, "turn 3", "'role'")


@pytest.mark.parametrize("value", [None, "", [], {}, "[]", [None, ""], {"a": None, "b": [{"c": ""}]}])
def test_what_a_table_fills_up_says_nothing(value):
    assert not is_set(value)


@pytest.mark.parametrize("value", [0, False, "x", [0], {"a": [None, {"b": 1}]}, b"x"])
def test_what_says_something(value):
    assert is_set(value)


def test_depth_is_no_trouble():
    deep = None
    for _ in range(100_000):
        deep = [deep]
    assert not is_set(deep)


@pytest.mark.parametrize(
    ("key", "value"),
    [("weight", 1), ("train", True), ("weight", None), ("label", 1), ("label", "cat"), ("split", "train"),
     ("tools", []), ("width", 7), ("video_id", "x"), ("frames", 12), ("clip", None), ("image", None)],
)  # fmt: skip
def test_keys_that_change_nothing_pass(key, value):
    assert check_left(Fields({key: value}), shows=False) == (() if value in (None, []) else (key,))


@pytest.mark.parametrize(
    ("level", "key", "value"),
    [("", "weight", 0.5), ("", "loss_scale", 0), ("", "label", 0), ("", "kto_tag", False), ("", "chosen_messages", [1]),
     ("", "margin_rejected", None), ("", "history", [["a", "b"]]), (TURN, "tool_calls", [1]), (TURN, "video", "v"),
     (PART, "fps", 1), (PART, "weight", 0), (PART, "path", "x"), ("", "thinking", "x"), ("", "max_pixels", 7)],
)  # fmt: skip
def test_keys_that_change_what_is_learned_do_not(level, key, value):
    row = Fields({})
    Fields({key: value}, level, "turn 2" if level else "", row)
    if value is None:
        assert check_left(row, shows=True) == ()
        return
    with pytest.raises(DataError, match=f"^{'turn 2: ' if level else ''}'{key}' .* is not read: "):
        check_left(row, shows=True)
