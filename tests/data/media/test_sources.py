"""How many bytes the files of a sample have."""

from __future__ import annotations

from pathlib import Path

import pytest

from dhp.core.errors import DataError
from dhp.data.media.sources import (
    Blob,
    Frames,
    Member,
    Remote,
    Settings,
    SizedImage,
    Sound,
    Video,
    open_media,
    stored_bytes,
)


def test_bytes_of_each_kind_of_file(tmp_path: Path) -> None:
    path, blob, member = tmp_path / "a", Blob("b", b"12345"), Member("c", tmp_path / "gone.tar", 512, 700)
    path.write_bytes(b"123")
    remote = Remote("https://example.org/a.png")  # nothing is fetched
    assert [stored_bytes(file) for file in (path, blob, member, remote)] == [3, 5, 700, 0]
    assert stored_bytes(Video(Frames((path, blob, path, remote)))) == 11
    assert stored_bytes(SizedImage(blob, Settings(fps=1.0))) == stored_bytes(Video(blob)) == stored_bytes(Sound(blob))


def test_a_file_that_is_gone(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"^{tmp_path}/a cannot be read: No such file"):
        stored_bytes(tmp_path / "a")


@pytest.mark.parametrize(
    "content, what, told",
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "image", "is a Git LFS pointer.*git lfs pull"),
        (b"\n<!DOCTYPE html><html>", "video", "is a web page"),
        (b"<html><body>404", "audio", "is a web page"),
        (b"%PDF-1.7", "image", "is a PDF"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "image", "is a HEIC picture"),
        (b"\0\0\0\x18ftypheic\0\0\0\0", "video", None),
        (b"\0\0\0\x18ftypisom\0\0\0\0", "image", None),
        (b"\x89PNG\r\n", "image", None),
    ],
)
def test_a_file_of_another_kind_is_named_by_its_first_bytes(
    tmp_path: Path, content: bytes, what: str, told: str | None
):
    (tmp_path / "a").write_bytes(content)
    for file in (Blob("b", content), tmp_path / "a"):
        if told is None:
            with open_media(file, what) as opened:
                assert opened.read() == content
            continue
        with pytest.raises(DataError, match=f"^{what} .*{told}"):
            open_media(file, what)
