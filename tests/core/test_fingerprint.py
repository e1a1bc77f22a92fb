"""A file that was exchanged is known, wherever it lies, without all of it being read."""

from __future__ import annotations

from pathlib import Path

import pytest

from dhp.core import files as module
from dhp.core.files import fingerprint


def write(file: Path, content: bytes) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file


def test_contents_and_names_count_and_places_do_not(tmp_path: Path) -> None:
    one = fingerprint([write(tmp_path / "a" / "x", b"one")])
    assert one == fingerprint([write(tmp_path / "b" / "x", b"one")])
    others = [[write(tmp_path / "c" / "x", b"two")], [write(tmp_path / "c" / "y", b"one")], []]
    assert len({one, *map(fingerprint, others)}) == 4


@pytest.mark.parametrize("at", [0, 500, 999])
def test_a_large_file_is_sampled_from_its_first_byte_to_its_last(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("_WHOLE", 100), ("_BLOCKS", 3), ("_BLOCK", 20)):
        monkeypatch.setattr(module, name, value)
    content = bytearray(1000)
    before = fingerprint([write(tmp_path / "x", bytes(content))])
    content[at] = 1
    assert fingerprint([write(tmp_path / "x", bytes(content))]) != before


def test_of_many_files_all_names_and_sizes_and_some_contents_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_FILES", 3)
    files = [write(tmp_path / str(number), b"0") for number in range(7)]
    before = fingerprint(files)
    for number in (0, 3, 6):
        write(files[number], b"1")
        assert fingerprint(files) != before
        write(files[number], b"0")
    write(files[1], b"00")
    assert fingerprint(files) != before
