"""One digest of a tower: the same for the same, another for whatever would make other features."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dhp.core.errors import ConfigError
from dhp.models import empty
from dhp.models.empty import digest_tower
from tests.helpers.tiny import save_model

PARTS = ("vision", "text")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("digest"))


def changed_weight(folder: Path, piece: str) -> None:
    file = next(folder.glob("*.safetensors"))
    tensors = load_file(file)
    name = sorted(name for name in tensors if piece in name)[0]
    tensors[name].view(-1)[0] += 0.001
    save_file(tensors, file, {"format": "pt"})


def changed_config(folder: Path, **vision: float) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["vision_config"] |= vision
    file.write_text(json.dumps(config))


def digest_of(folder: Path, dtype: str = "bfloat16") -> str:
    return digest_tower(str(folder), dtype, PARTS)


@pytest.mark.parametrize(
    "change, same",
    [
        (lambda folder: None, True),
        (lambda folder: changed_weight(folder, "visual.blocks"), False),
        (lambda folder: changed_weight(folder, "visual.merger"), False),
        (lambda folder: changed_weight(folder, "layers.0.mlp"), True),
        (lambda folder: changed_config(folder, window_size=112), False),
    ],
    ids=["a copy", "a weight of the tower", "of the projector", "of the decoder", "the tower's configuration"],
)
def test_it_changes_with_the_tower_alone(
    change: Callable[[Path], None], same: bool, model: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    change(copy)
    assert (digest_of(copy) == digest_of(model)) is same


def test_it_changes_with_the_number_format(model: Path) -> None:
    assert len({digest_of(model, dtype) for dtype in ("bfloat16", "float32", "float64")}) == 3


def test_a_tower_that_draws_lots_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = empty.load_part

    def dropping(*arguments: object) -> torch.nn.Module:
        found = load(*arguments)
        found.model.visual.add_module("dropout", torch.nn.Dropout(0.1))
        return found

    monkeypatch.setattr(empty, "load_part", dropping)
    with pytest.raises(ConfigError, match=r"model\.visual\.dropout of the tower, which drops .* chance of 0\.1"):
        digest_of(model)
