"""Models as ordinary directories: nothing of what was trained is lost on the way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from dhp.core.errors import ModelError
from dhp.models.export import save_whole
from dhp.models.load import model_class
from dhp.tiny.tiny_model import make_family


def tied(folder: Path) -> dict[str, Tensor]:
    """A model whose configuration ties its head, with a head of its own: its weights by name."""
    make_family("llava", folder)
    weights = {name: p.detach() for name, p in model_class(str(folder)).from_pretrained(folder).named_parameters()}
    config = json.loads((folder / "config.json").read_text())
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = True
    (folder / "config.json").write_text(json.dumps(config))
    assert not torch.equal(weights["lm_head.weight"], weights["model.language_model.embed_tokens.weight"])
    return weights


def test_a_head_that_is_not_the_embedding_is_written_though_the_configuration_ties_them(tmp_path: Path) -> None:
    weights = tied(tmp_path / "model")
    save_whole(tmp_path / "model", weights, tmp_path / "out")
    read = dict(model_class(str(tmp_path / "out")).from_pretrained(tmp_path / "out").named_parameters())
    assert read.keys() == weights.keys() and all(torch.equal(read[name], one) for name, one in weights.items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is False


def test_a_head_that_is_the_embedding_stays_tied(tmp_path: Path) -> None:
    weights = tied(tmp_path / "model")
    weights["lm_head.weight"] = weights["model.language_model.embed_tokens.weight"].clone()
    save_whole(tmp_path / "model", weights, tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as tensors:
        assert len(tensors.keys()) == len(weights) - 1
    assert json.loads((tmp_path / "out" / "config.json").read_text())["tie_word_embeddings"] is True


def without_norms(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in state.items() if "norm" not in name}


def with_zeros(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor * 0 if "q_proj" in name else tensor for name, tensor in state.items()}


@pytest.mark.parametrize(
    "change, reason",
    [(without_norms, r"\d+ of \d+ numbers were written, none are"), (with_zeros, r"\[\(\d+, \d+\).* other bytes")],
)
def test_what_is_written_otherwise_is_an_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    reason: str,
) -> None:
    weights = tied(tmp_path / "model")
    kind = model_class(str(tmp_path / "model"))
    whole = kind.save_pretrained
    changed = lambda model, folder: whole(model, folder, state_dict=change(model.state_dict()))
    monkeypatch.setattr(kind, "save_pretrained", changed)
    with pytest.raises(ModelError, match=f"would be another model .*{reason}"):
        save_whole(tmp_path / "model", weights, tmp_path / "out")
