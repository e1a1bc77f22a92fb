"""Other rotary positions, in a directory's configuration: as transformers reads them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from dhp.core.errors import ModelError
from dhp.models.config_file import _changed, change_positions


@pytest.fixture
def folder(made_model: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made_model, tmp_path / "model"))


def test_a_raised_base_turns_slower_and_nothing_else_changes(folder: Path, made_model: str) -> None:
    before = AutoConfig.from_pretrained(made_model).to_dict()
    change_positions(folder, rope_theta=5e5, max_positions=1 << 16)
    after = AutoConfig.from_pretrained(folder).to_dict()
    text = after["text_config"]
    assert (text["rope_parameters"]["rope_theta"], text["max_position_embeddings"]) == (5e5, 1 << 16)
    for told in (before, after):
        told["text_config"]["rope_parameters"].pop("rope_theta"), told["text_config"].pop("max_position_embeddings")
        told.pop("_name_or_path", None), told["text_config"].pop("_name_or_path", None)
    assert after == before
    plain, raised = (AutoModelForImageTextToText.from_pretrained(path) for path in (made_model, folder))
    slow, fast = (model.model.language_model.rotary_emb.inv_freq for model in (raised, plain))
    width = 2 * len(slow)
    assert torch.allclose(slow, 5e5 ** (-torch.arange(0, width, 2) / width)) and (slow[1:] < fast[1:]).all()


def test_what_is_not_named_stays(folder: Path) -> None:
    change_positions(folder, max_positions=9000)
    text = AutoConfig.from_pretrained(folder).get_text_config()
    assert (text.rope_parameters["rope_theta"], text.max_position_embeddings) == (10000.0, 9000)


def test_layers_with_a_window_keep_their_base() -> None:
    both = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    }
    changed = _changed(Path("m"), both, 1e7, None)
    assert changed["sliding_attention"] == both["sliding_attention"]
    assert changed["full_attention"]["rope_theta"] == 1e7


def test_yarn_goes_on_from_what_the_model_was_trained_with() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6}
    assert _changed(Path("m"), yarn, None, 32768)["original_max_position_embeddings"] == 32768
    told = {**yarn, "original_max_position_embeddings": 4096}
    assert _changed(Path("m"), told, None, 32768) == told


def test_a_decoder_without_rotary_positions_is_refused() -> None:
    with pytest.raises(ModelError, match="m: its decoder has no rotary positions"):
        _changed(Path("m"), None, 1e6, None)
