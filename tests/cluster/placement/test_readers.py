"""What a node says of the data that it has."""

from __future__ import annotations

from pathlib import Path

from dhp.cluster.placement.nodes import signature

KEY = "data.data_registry.a"


def of(path: Path, data: Path) -> tuple[str, ...]:
    return signature({f"{KEY}.annotation_path": str(path), f"{KEY}.data_path": str(data)})


def test_annotations_count_by_their_contents_and_folders_by_being_there(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    for folder in (one, two):
        folder.mkdir()
        (folder / "a.json").write_text("[1]")
    assert of(one / "a.json", one) == of(two / "a.json", two)
    (two / "more.png").touch()
    assert of(one / "a.json", one) == of(two / "a.json", two)
    (two / "a.json").write_text("[2]")
    assert of(one / "a.json", one) != of(two / "a.json", two)


def test_what_is_missing_is_another_thing_than_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("[1]")
    whole = of(tmp_path / "a.json", tmp_path)
    assert of(tmp_path / "b.json", tmp_path) != whole
    assert of(tmp_path / "a.json", tmp_path / "none") != whole
    assert of(tmp_path / "b.json", tmp_path)[0] == "missing"


def test_a_folder_of_shards_counts_by_its_files(tmp_path: Path) -> None:
    (tmp_path / "0.tar").write_bytes(b"a")
    before = of(tmp_path, tmp_path)
    (tmp_path / "1.tar").write_bytes(b"b")
    assert of(tmp_path, tmp_path) != before
