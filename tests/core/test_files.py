"""Files and folders that appear complete or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from dhp.core.files import new_folder, replaced, require_writable, write_whole


def test_a_folder_has_its_name_when_it_is_complete(tmp_path: Path) -> None:
    wanted = tmp_path / "above" / "made"
    with new_folder(wanted) as partial:
        partial.mkdir()
        (partial / "file").write_text("own")
        assert not wanted.exists()
    assert (wanted / "file").read_text() == "own" and list(wanted.parent.iterdir()) == [wanted]


def test_the_folder_of_a_faster_maker_stays(tmp_path: Path) -> None:
    wanted = tmp_path / "made"
    with new_folder(wanted) as partial:
        partial.mkdir()
        wanted.mkdir()
        (wanted / "file").write_text("other")
    assert (wanted / "file").read_text() == "other" and list(tmp_path.iterdir()) == [wanted]


def test_what_cannot_get_its_name_is_told_and_removed(tmp_path: Path) -> None:
    with pytest.raises(OSError), new_folder(tmp_path / "made"):
        pass  # nothing was made, so nothing can be renamed
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "above" / "file"
    write_whole(path, "one ä")
    assert path.read_text(encoding="utf-8") == "one ä"
    with pytest.raises(RuntimeError), replaced(path) as unfinished:
        unfinished.write_text("half")
        raise RuntimeError
    assert path.read_text(encoding="utf-8") == "one ä"
    write_whole(path, b"two")
    assert path.read_bytes() == b"two" and list(path.parent.iterdir()) == [path]


def test_a_folder_that_cannot_be_written_is_found(tmp_path: Path) -> None:
    require_writable(tmp_path / "new")
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(OSError):
        require_writable(tmp_path / "file" / "below")
    with pytest.raises(OSError), replaced(tmp_path / "file" / "below"):
        pass
