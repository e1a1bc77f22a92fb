from __future__ import annotations

import json
from pathlib import Path

import pytest

from dhp.core.errors import DataError
from dhp.data.read.annotations import read_annotations

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
