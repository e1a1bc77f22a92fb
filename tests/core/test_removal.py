"""Removing takes a folder, a file or a link, and never what a link leads to."""

from __future__ import annotations

from pathlib import Path

from dhp.core.files import remove


def test_folders_files_and_links(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    (kept / "deep").mkdir(parents=True)
    (kept / "file").touch()
    for name, target in (("to a folder", kept), ("to a file", kept / "file"), ("to nothing", tmp_path / "gone")):
        link = tmp_path / name
        link.symlink_to(target)
        remove(link)
        assert not link.is_symlink()
    assert (kept / "deep").is_dir() and (kept / "file").is_file()
    remove(kept / "file")
    remove(kept)
    remove(kept)  # nothing there is no error
    assert list(tmp_path.iterdir()) == []
