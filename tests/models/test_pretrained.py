"""Files of a model's directory that are not what they are called, found before anything reads weights."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

from dhp.core.errors import ModelError
from dhp.models.pretrained import check_weight_files


class Harmful:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return (open, ("made by a pickle", "w"))  # type: ignore[return-value]


@pytest.mark.parametrize(
    "content, reason",
    [
        ({"weight_map": {"a": "../outside.safetensors"}}, "names '../outside.safetensors', which is outside"),
        ({"weight_map": {"a": "/etc/hostname"}}, "which is outside"),
        ({"weight_map": {"a": 3}}, "names 3, which is outside"),
        ({"weight_map": {"a": "gone.safetensors"}}, "names gone.safetensors, which is not there"),
        ({"weight_map": ["a"]}, "is no index of weights"),
        ({}, "is no index of weights"),
        ({"weight_map": {"a": "there.safetensors"}}, None),
    ],
)
def test_an_index_names_files_of_its_folder(tmp_path: Path, content: object, reason: str | None) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in (tmp_path / "outside.safetensors", folder / "there.safetensors"):
        file.write_bytes(b"")
    (folder / "model.safetensors.index.json").write_text(json.dumps(content))
    if reason is None:
        check_weight_files(folder)
        return
    with pytest.raises(ModelError, match=f"model.safetensors.index.json .*{reason}"):
        check_weight_files(folder)


@pytest.mark.parametrize("content", [b"", b"x" * 300, pickle.dumps(Harmful(), 2), pickle.dumps({"a": Harmful()}, 2)])
def test_a_strangers_pickle_is_refused_and_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(ModelError, match="pytorch_model.bin is no file of weights alone"):
        check_weight_files(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["pytorch_model.bin"]
    (tmp_path / "model.safetensors").write_bytes(b"")  # which is read in its place
    check_weight_files(tmp_path)


@pytest.mark.parametrize("zipped", [True, False])
def test_weights_as_torch_saves_them_pass(tmp_path: Path, zipped: bool) -> None:
    weights = {"a": torch.ones(2)}
    torch.save(weights, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)
    check_weight_files(tmp_path)
