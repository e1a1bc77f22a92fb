"""What of a model's directory goes into checkpoints and exports: its own files, and nothing that a link leads to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dhp.core.errors import ModelError
from dhp.models.pretrained import auxiliary_files


def test_weights_and_hidden_files_stay_behind(tmp_path: Path) -> None:
    for name in ("config.json", "a.safetensors", "a.safetensors.index.json", "code.py", ".env", ".gitattributes"):
        (tmp_path / name).touch()
    (tmp_path / "linked.json").symlink_to("config.json")
    assert [file.name for file in auxiliary_files(str(tmp_path))] == ["code.py", "config.json", "linked.json"]


@pytest.mark.parametrize("name", ["NOTICE.txt", ".hidden"])
def test_a_link_out_of_the_directory_publishes_nothing(name: str, tmp_path: Path) -> None:
    (tmp_path / "id_rsa").write_text("PRIVATE KEY MATERIAL")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").touch()
    (model / name).symlink_to(tmp_path / "id_rsa")
    with pytest.raises(ModelError, match=rf"{name} leads to .*id_rsa, and would be copied"):
        auxiliary_files(str(model))
    (model / name).unlink()
    beside = tmp_path / "model2"  # whose name begins alike
    beside.mkdir()
    (beside / "a").touch()
    (model / name).symlink_to(beside / "a")
    with pytest.raises(ModelError, match="would be copied"):
        auxiliary_files(str(model))


def test_the_hubs_cache_links_its_files(tmp_path: Path) -> None:
    repository = tmp_path / "models--a--b"
    snapshot, blobs = repository / "snapshots" / "0123", repository / "blobs"
    for folder in (snapshot, blobs):
        folder.mkdir(parents=True)
    (blobs / "ffff").touch()
    os.symlink("../../blobs/ffff", snapshot / "config.json")
    assert [file.name for file in auxiliary_files(str(snapshot))] == ["config.json"]
    other = tmp_path / "models--c--d" / "blobs"
    other.mkdir(parents=True)
    (other / "eeee").touch()
    os.symlink("../../../models--c--d/blobs/eeee", snapshot / "other.json")
    with pytest.raises(ModelError, match=r"other\.json leads to"):
        auxiliary_files(str(snapshot))
