"""Rows of every format become checked records."""

import json
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dhp.core.batch import IGNORED
from dhp.core.errors import DataError
from dhp.data.media.sources import MediaResolver
from dhp.data.read.annotations import detect, parse_record, read_annotations
from dhp.data.read.records import PART, TURN, Fields, Record, Turn, check_left, is_set
from tests.data.sample.made import make_preprocessor

GOOD = {"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Yes."}]}
BAD = {"conversations": []}


def test_json_counts_elements_from_one(write_json):
    file = read_annotations("set", write_json([GOOD, BAD, GOOD]), None)
    assert len(file) == 3
    assert [file.record(0).position, file.record(2).position] == [1, 3]
    with pytest.raises(DataError, match=r"^dataset 'set', element 2 of .*annotations\.json: 'conversations' is empty$"):
        file.record(1)


def test_jsonl_counts_lines_and_ignores_blank_ones(tmp_path):
    path = tmp_path / "a.jsonl"
    line = '{"conversations": [{"from": "human", "value": "Hi\u2028?"}, {"from": "gpt", "value": "Yes."}]}'
    path.write_text(f"\n{line}\r\n\n  \n{{}}\n{line}", encoding="utf-8")
    file = read_annotations("set", path, None)
    assert [file.rows.locate(index) for index in range(len(file))] == [f"line {n} of {path}" for n in (2, 5, 6)]
    assert file.record(0).turns[0].parts == ("Hi\u2028?",)
    with pytest.raises(DataError, match=r"^dataset 'set', line 5 of .*a\.jsonl: key 'conversations' is missing"):
        file.record(1)


def test_a_byte_order_mark_is_ignored(tmp_path):
    path = tmp_path / "a.json"
    path.write_bytes(b'\xef\xbb\xbf[{"conversations": []}]')
    assert len(read_annotations("set", path, None)) == 1


@pytest.mark.parametrize(
    "name, content, reason",
    [
        ("a.json", b'[\n{"a": 1},\n{"b" 2}\n]', r"a\.json: malformed JSON at line 3, column 6: "),
        ("a.json", b'[{"a": 1},', r"malformed JSON at line 1, column 11"),
        ("a.json", b"", r"malformed JSON at line 1, column 1"),
        ("a.json", b'{"a": 1}\n{"a": 2}\n', r"malformed JSON at line 2, column 1: .* call the file \.jsonl"),
        ("a.json", b'{"a": 1}', r"one JSON object, not an array"),
        ("a.json", b"[]", r"holds no sample"),
        ("a.json", b'[\n"\xff"]', r"line 2 is not UTF-8 \(byte 0xff\)"),
        ("a.json", b"[" * 200_000, r"JSON cannot be read"),
        ("a.jsonl", b'\n{"a": \nb\n', r"line 2 of .*a\.jsonl: malformed JSON at column 6"),  # and no line is any better
        ("a.jsonl", b"\xff\xfe{\x00", r"a\.jsonl: the file is UTF-16"),
        ("a.json", b"\x1f\x8b\x08", r"a\.json: the file is compressed by gzip"),
        ("a.jsonl.gz", b"\x1f\x8b\x08", r"a\.jsonl\.gz is compressed.* Unpack it"),
        ("a.jsonl", b"\n\n", r"holds no sample"),
    ],
)
def test_a_spoiled_file_is_named_with_its_line(tmp_path, name, content, reason):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=r"dataset 'set': .*" + reason):
        read_annotations("set", tmp_path / name, None)


@pytest.mark.parametrize(
    "line, reason",
    [
        (b'{"a": ', "malformed JSON at column 6"),
        (b'{"a": 1} x', "malformed JSON at column 10"),
        (b'{"a": "\xe4"}', r"the line is not UTF-8 \(byte 0xe4\)"),
        (b"[" * 200_000, "JSON cannot be read"),
    ],
)
def test_a_spoiled_line_is_named_and_the_others_are_read(tmp_path, line, reason):
    good = json.dumps(GOOD).encode()
    (tmp_path / "a.jsonl").write_bytes(b"\n".join([good, b"", line, good]))
    file = read_annotations("set", tmp_path / "a.jsonl", None)
    assert [file.record(index).position for index in (0, 2)] == [1, 3]
    with pytest.raises(DataError, match=rf"^dataset 'set', line 3 of .*a\.jsonl: {reason}"):
        file.record(1)


def test_a_missing_file_names_the_setting(tmp_path):
    with pytest.raises(DataError, match=r"no\.json does not exist.*data\.data_registry\.set\.annotation_path"):
        read_annotations("set", tmp_path / "no.json", None)


def test_a_folder_is_no_annotation_file(tmp_path):
    with pytest.raises(DataError, match=r"is a folder with 0 \.parquet and 0 \.tar files"):
        read_annotations("set", tmp_path, None)


def test_a_missing_data_path_is_found_before_training(write_json):
    with pytest.raises(DataError, match="data_path /nowhere is not a folder"):
        read_annotations("set", write_json([GOOD]), Path("/nowhere"))


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


WALLS = "Walls are painted red, green or blue. " * 20


def written(raw: Any) -> Record:
    return parse_record(raw, "books", 1, "books: row 1", "text", MediaResolver(None))


def test_all_tokens_are_learned_up_to_the_end_token(tokenizer) -> None:
    sample = make_preprocessor(tokenizer, system_prompt="A system text.")(written({"text": WALLS}))
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


ASK = {"from": "human", "value": "What is it?"}
LOOK = {"from": "human", "value": "<image>\nWhat is it?"}
ANSWER = {"from": "gpt", "value": "A circle."}
SYSTEM = {"from": "system", "value": "Be brief."}


def parse(raw, data_path=None):
    return parse_record(raw, "set", 3, "here", "llava", MediaResolver(data_path))


def test_roles_text_and_place():
    record = parse({"conversations": [SYSTEM, ASK, ANSWER, {"from": "human", "value": "Sure?"}, ANSWER]})
    assert record.turns == (
        Turn("system", ("Be brief.",)),
        Turn("user", ("What is it?",)),
        Turn("assistant", ("A circle.",)),
        Turn("user", ("Sure?",)),
        Turn("assistant", ("A circle.",)),
    )
    assert (record.dataset, record.position, record.where, record.images) == ("set", 3, "here", ())


@pytest.mark.parametrize(
    "text, parts",
    [
        ("<image>\nWhat?", ("a.png", "What?")),
        ("What?\n<image>", ("What?", "a.png")),
        ("<image>", ("a.png",)),
        ("See <image> now", ("See ", "a.png", " now")),
        ("Two\n\n<image>\n\nlines", ("Two\n", "a.png", "\nlines")),
    ],
)
def test_a_tag_becomes_an_image_in_its_place(images, text, parts):
    record = parse({"image": "a.png", "conversations": [{"from": "human", "value": text}, ANSWER]}, images)
    expected = tuple(images.resolve() / part if part == "a.png" else part for part in parts)
    assert record.turns[0].parts == expected


def test_images_of_several_turns_are_taken_in_order(images):
    turns = [{"from": "human", "value": "<image>\n<image>\nCompare."}, ANSWER, LOOK, ANSWER]
    record = parse({"image": ["b.jpg", "a.png", "sub/c.png"], "conversations": turns}, images)
    assert [path.relative_to(images.resolve()) for path in record.images] == [
        Path("b.jpg"),
        Path("a.png"),
        Path("sub/c.png"),
    ]
    assert record.turns[2].parts[0] == images.resolve() / "sub/c.png"


def test_a_tag_in_an_answer_is_text():
    answer = {"from": "gpt", "value": "I wrote <image>."}
    assert parse({"conversations": [ASK, answer]}).turns[1].parts == ("I wrote <image>.",)


@pytest.mark.parametrize(
    "raw, reason",
    [
        ([], "expected an object"),
        ("text", "expected an object"),
        ({"id": 1}, "'conversations' is missing"),
        ({"conversations": "hi"}, "must be a list"),
        ({"conversations": []}, "is empty"),
        ({"conversations": ["hi"]}, "turn 1 must be an object"),
        (
            {"conversations": [{"from": "human"}, ANSWER]},
            "turn 1: 'value' must be a string or a list of parts, got None",
        ),
        ({"conversations": [{"from": 3, "value": "x"}, ANSWER]}, "turn 1: 'from' must be a string, got 3"),
        (
            {"conversations": [ASK, {"from": "gpt", "value": 7}]},
            "turn 2: 'value' must be a string or a list of parts, got 7",
        ),
        ({"conversations": [{"from": "robot", "value": "x"}, ANSWER]}, "turn 1: unknown role 'robot'"),
        ({"conversations": [ASK, {"from": "gpt", "value": " "}]}, "turn 2: the answer is empty"),
        ({"conversations": [ANSWER]}, "must begin with a human turn"),
        ({"conversations": [SYSTEM]}, "must begin with a human turn"),
        ({"conversations": [SYSTEM, ANSWER]}, "must begin with a human turn"),
        ({"conversations": [ASK, SYSTEM, ANSWER]}, "system turn can only be the first"),
        ({"conversations": [ASK, ASK, ANSWER]}, "turns 1 and 2 are both from the user"),
        ({"conversations": [SYSTEM, ASK, ANSWER, ANSWER]}, "turns 3 and 4 are both from the assistant"),
        ({"conversations": [ASK, ANSWER, ASK]}, "last turn must be from gpt"),
        ({"conversations": [LOOK, ANSWER]}, "1 <image> tags in the human turns, but 0 images"),
        ({"conversations": [ASK, ANSWER], "image": "a.png"}, "0 <image> tags in the human turns, but 1 images"),
        ({"conversations": [LOOK, ANSWER], "image": ["a.png", "b.jpg"]}, "1 <image> tags .* but 2 images"),
        ({"conversations": [LOOK, ANSWER], "image": 5}, "'image' must be a path or a list of paths, got 5"),
        ({"conversations": [LOOK, ANSWER], "image": ""}, "1 <image> tags in the human turns, but 0 images"),
        ({"conversations": [LOOK, ANSWER], "image": [None]}, "'image' must be a path"),
        ({"conversations": [ASK, ANSWER], "video": "v.mp4"}, "0 <video> tags in the human turns, but 1 videos"),
    ],
)
def test_defects_of_a_sample_are_named(images, raw, reason):
    with pytest.raises(DataError, match=reason):
        parse(raw, images)


def test_an_image_needs_a_data_path():
    with pytest.raises(DataError, match="no data_path"):
        parse({"image": "a.png", "conversations": [LOOK, ANSWER]})


@pytest.mark.parametrize(
    "name", ["../secret.png", "sub/../../secret.png", "/etc/hostname", "link.png", "out/secret.png"]
)
def test_an_image_outside_data_path_is_refused(images, name):
    outside = images.parent / "secret.png"
    outside.write_bytes((images / "a.png").read_bytes())
    (images / "link.png").symlink_to(outside)
    (images / "out").symlink_to(images.parent)
    with pytest.raises(DataError, match="leaves data_path .* refused"):
        parse({"image": name, "conversations": [LOOK, ANSWER]}, images)


def test_a_neighbour_folder_with_the_same_prefix_is_outside(images):
    with pytest.raises(DataError, match="leaves data_path"):
        parse({"image": "../images2/a.png", "conversations": [LOOK, ANSWER]}, images)


@pytest.mark.parametrize("name", ["sub/../a.png", "inside.png"])
def test_links_and_dots_that_stay_inside_are_allowed(images, name):
    (images / "inside.png").symlink_to(images / "a.png")
    record = parse({"image": name, "conversations": [LOOK, ANSWER]}, images)
    assert record.images == (images.resolve() / "a.png",)


def test_data_path_may_itself_be_a_link(images):
    link = images.parent / "link"
    link.symlink_to(images)
    record = parse({"image": "a.png", "conversations": [LOOK, ANSWER]}, link)
    assert record.images == (images.resolve() / "a.png",)


@pytest.mark.parametrize("name", ["a\0.png", "loop.png"])
def test_a_path_that_cannot_be_resolved_is_a_data_error(images, name):
    (images / "loop.png").symlink_to(images / "loop.png")
    with pytest.raises(DataError, match="cannot be resolved"):
        parse({"image": name, "conversations": [LOOK, ANSWER]}, images)


def test_the_prompt_is_that_of_the_first_answer_that_is_learned():
    unlearned = ANSWER | {"weight": 0}
    record = parse({"conversations": [ASK, unlearned, {"from": "human", "value": "Sure?"}, ANSWER]})
    prompt, said = record.up_to_answer()
    assert said == "A circle." and len(prompt.turns) == 3 and prompt.asks
    nothing = replace(record, turns=(*record.turns[:3], replace(record.turns[3], learned=False)))
    with pytest.raises(DataError, match="no answer of it is learned"):
        nothing.up_to_answer()
