"""A file for each key: whole or not there, and never that of another key."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dhp.checkpoint.feature_folder import FeatureFolder
from dhp.core.batch import Features
from dhp.core.errors import ConfigError

KEY, OTHER = "ab" * 32, "cd" * 32


def made(key: str = KEY, fill: float = 1.0) -> Features:
    rows = {"embeddings": torch.rand(3, 4), "deepstack.0": torch.full((3, 4), fill, dtype=torch.bfloat16)}
    return Features(key, "[[1, 2, 6], null, [], []]", rows)


def file_of(folder: Path, key: str = KEY) -> Path:
    return folder / key[:2] / f"{key}.safetensors"


def same(found: Features | None, wanted: Features) -> bool:
    if found is None or (found.key, found.about) != (wanted.key, wanted.about):
        return False
    ours, theirs = found.tensors or {}, wanted.tensors or {}
    alike = lambda name: ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name])
    return ours.keys() == theirs.keys() and all(map(alike, theirs))


def test_what_is_kept_comes_back_to_the_bit(tmp_path: Path) -> None:
    kept, folder = made(), FeatureFolder(tmp_path)
    assert folder.load(KEY) is None and folder.size(KEY) == folder.nbytes() == 0
    folder.save(kept)
    assert same(folder.load(KEY), kept) and folder.load(OTHER) is None
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [file_of(tmp_path)]
    assert folder.nbytes() == folder.size(KEY) == file_of(tmp_path).stat().st_size


def test_columns_of_a_larger_tensor_are_kept_as_they_are(tmp_path: Path) -> None:
    rows = torch.rand(4, 6)[:, ::2]
    FeatureFolder(tmp_path).save(Features(KEY, "", {"embeddings": rows}))
    found = FeatureFolder(tmp_path).load(KEY)
    assert found is not None and torch.equal(found.tensors["embeddings"], rows)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut off": lambda content: content[:-5],
    "in its numbers": lambda content: content[:-3] + bytes([content[-3] ^ 1]) + content[-2:],
    "in what it says of the picture": lambda content: content.replace(b"[[1, 2, 6]", b"[[1, 3, 4]"),
    "of another key": lambda content: content.replace(KEY.encode(), OTHER.encode()),
    "no length": lambda content: b"\xff" * 8 + content[8:],
    "no JSON": lambda content: content[:8] + b"?" + content[9:],
    "text": lambda content: b"not a file of tensors",
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_not_there_and_is_replaced(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    folder, path = FeatureFolder(tmp_path), file_of(tmp_path)
    folder.save(made())
    whole = path.read_bytes()
    assert damage(whole) != whole
    path.write_bytes(damage(whole))
    assert folder.load(KEY) is None
    again = made(fill=2.0)
    folder.save(again)
    assert same(folder.load(KEY), again)


def test_a_file_under_the_name_of_another_key_is_not_read(tmp_path: Path) -> None:
    folder = FeatureFolder(tmp_path)
    folder.save(made())
    file_of(tmp_path, OTHER).parent.mkdir()
    file_of(tmp_path).rename(file_of(tmp_path, OTHER))
    assert folder.load(OTHER) is None


@pytest.mark.parametrize("key", ["../" + "a" * 61, "a" * 63, "AB" * 32, "a" * 63 + "/", "a" * 64 + "\n", ""])
def test_only_digests_become_paths(key: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no key of features"):
        FeatureFolder(tmp_path).load(key)


def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> int:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ConfigError, match=r"cannot be kept in .*: No space left on device\. Set data\.cache_features"):
        FeatureFolder(tmp_path).save(made())
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = FeatureFolder(tmp_path / "file")
    with pytest.raises(ConfigError, match="cannot be written: "):
        folder.check()
    with pytest.raises(ConfigError, match="cannot be read"):
        folder.load(KEY)


def test_a_folder_is_made_and_left_empty(tmp_path: Path) -> None:
    FeatureFolder(tmp_path / "new" / "one").check()
    assert list((tmp_path / "new" / "one").iterdir()) == []
