"""How many bytes the files of a sample have."""

from __future__ import annotations

from pathlib import Path

import pytest

from dhp.core.errors import DataError
from dhp.data.media.sources import Blob, Frames, Member, Remote, Settings, SizedImage, Sound, Video, stored_bytes


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
