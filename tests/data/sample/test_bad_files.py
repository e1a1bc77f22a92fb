"""Annotation files that are wrong as a whole: named before any training, whatever data.on_bad_sample says."""

from __future__ import annotations

import io
import tarfile

import pytest

from dhp.config.data import DatasetEntry
from dhp.core.errors import DataError
from dhp.data.sampling.dataset import open_dataset

FILES: dict[str, tuple[str, bytes, str]] = {
    "empty JSON": ("a.json", b"", "malformed JSON at line 1, column 1"),
    "empty JSONL": ("a.jsonl", b"", "holds no sample"),
    "blank JSONL": ("a.jsonl", b"\n \n\n", "holds no sample"),
    "empty array": ("a.json", b"[]", "holds no sample"),
    "JSON error in line 3": ("a.json", b'[\n{"a": 1},\n{"b" 2}\n]', "malformed JSON at line 3, column 6"),
    "JSON of another type": ("a.json", b'{"a": 1}', "one JSON object, not an array"),
    "samples under a key": ("a.json", b'{"version": 1, "data": [{}]}', "samples stand under 'data'. Save that list"),
    "JSONL called JSON": ("a.json", b'{"a": 1}\n{"a": 2}\n', r"call the file \.jsonl"),
    "array called JSONL": ("a.jsonl", b'[\n{"a": 1},\n{"a": 2}]', "malformed JSON at column 2"),
    "no UTF-8": ("a.json", b'[\n"\xff"]', r"line 2 is not UTF-8 \(byte 0xff\)"),
    "UTF-16": ("a.jsonl", '{"a": 1}'.encode("utf-16"), "the file is UTF-16"),
    "CSV without a line of names": ("a.csv", b"", "the first line must name the columns, each once"),
    "CSV with two columns of a name": ("a.csv", b"query,query\nx,y\n", "each once; it has .'query', 'query'"),
    "CSV with a longer row": (
        "a.csv", b"query,response\nx,y\nx,y,z\n", "line 3 has 3 cells, and the first line names 2"),
    "CSV with an open quote": ("a.csv", b'query,response\nx,"y\n', "the file is no CSV: "),
    "CSV that is no UTF-8": ("a.csv", b"query,response\nx,\xff\n", r"not UTF-8 \(byte"),
    "CSV of names alone": ("a.csv", b"query,response\n", "holds no sample"),
    "text": ("a.txt", b"What?", r"is a \.txt file, and read are \.json, .*\.csv.* Convert it"),
    "a sheet": ("a.xlsx", b"PK", r"is a \.xlsx file"),
    "compressed": ("a.json", b"\x1f\x8b\x08\0", "the file is compressed by gzip"),
    "compressed shard": ("a.tar.gz", b"\x1f\x8b\x08\0", "is compressed"),
    "no tar": ("a.tar", b"not an archive" * 100, "no readable tar file"),
    "empty tar": ("a.tar", b"", "no readable tar file"),
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
def test_a_bad_file(tmp_path, kind):
    name, content, reason = FILES[kind]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"^dataset 'set': (?s:.)*{name}(?s:.)*{reason}"):
        open_dataset(["set"], {"set": DatasetEntry(str(tmp_path / name))})


@pytest.mark.parametrize("name", ["gone.jsonl", "x" * 300, "a\0.json", "a.json/b.json"])
def test_a_file_that_is_not_there(tmp_path, name):
    (tmp_path / "a.json").write_bytes(b"[{}]")
    with pytest.raises(DataError, match=r"^dataset 'set': annotation file .* does not exist"):
        open_dataset(["set"], {"set": DatasetEntry(str(tmp_path / name))})
    with pytest.raises(DataError, match=r"^dataset 'set': data_path .* is not a folder"):
        open_dataset(["set"], {"set": DatasetEntry(str(tmp_path / "a.json"), str(tmp_path / name))})


def test_a_shard_that_is_cut_off(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as archive:
        info = tarfile.TarInfo("1.png")
        info.size = 4000
        archive.addfile(info, io.BytesIO(b"x" * 4000))
    path.write_bytes(path.read_bytes()[:2500])
    with pytest.raises(DataError, match=r"^dataset 'set': .*a\.tar: .*(cut off|unexpected end of data)"):
        open_dataset(["set"], {"set": DatasetEntry(str(path))})
