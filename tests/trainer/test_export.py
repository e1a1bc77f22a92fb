"""What an export says besides its weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from dhp.trainer.export import _write_stops

OTHER = "<|vision_pad|>"  # in the place of the tokenizer's eos


def folder_of(tiny_assets: Path, folder: Path, end: str, known: object) -> tuple[Path, list[int]]:
    """A model whose template ends answers with `end`; the numbers of its own end and of that."""
    shutil.copytree(tiny_assets / "model", folder)
    template = folder / "chat_template.jinja"
    template.write_text(template.read_text().replace("<|im_end|>", end))
    (folder / "generation_config.json").write_text(json.dumps(known))
    return folder, AutoTokenizer.from_pretrained(folder).convert_tokens_to_ids(["<|im_end|>", OTHER])


@pytest.mark.parametrize("listed", [False, True])
def test_others_stop_where_the_answers_that_were_learned_end(tiny_assets: Path, tmp_path: Path, listed: bool) -> None:
    first, _ = folder_of(tiny_assets, tmp_path / "a", "<|im_end|>", {})[1]
    folder, (_, end) = folder_of(
        tiny_assets, tmp_path / "b", OTHER, {"eos_token_id": [first] if listed else first, "top_k": 3}
    )
    assert f"has {OTHER} among the tokens that stop" in _write_stops(folder)
    written = json.loads((folder / "generation_config.json").read_text())
    assert written == {"eos_token_id": [first, end], "top_k": 3}
    assert _write_stops(folder) == ""


def test_an_end_that_only_the_tokenizer_names_is_written_too(tiny_assets: Path, tmp_path: Path) -> None:
    """`generate` of transformers looks at generation_config.json alone."""
    folder, (end, other) = folder_of(tiny_assets, tmp_path / "a", "<|im_end|>", {})
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": other}))
    assert _write_stops(folder)
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [other, end]


def test_a_model_without_a_tokenizer_stays_as_it_is(tiny_assets: Path, tmp_path: Path) -> None:
    folder, _ = folder_of(tiny_assets, tmp_path / "a", OTHER, {"eos_token_id": 1})
    for file in folder.glob("tokenizer*"):
        file.unlink()
    assert _write_stops(folder) == ""
