"""A folder that appears complete or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from dhp.base.new_folder import new_folder


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
