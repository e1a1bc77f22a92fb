from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoTokenizer, Qwen2_5_VLForConditionalGeneration

from dhp.core.errors import ModelError
from dhp.tiny import tiny_model as tiny
from dhp.tiny.tiny_model import SPECIAL_TOKENS, make_tiny_model, make_tokenizer

CORPUS = ["What colour is the circle?", "red and blue", "How many shapes are there?"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("made") / "deep" / "tiny", CORPUS, seed=5)


@pytest.fixture(scope="module")
def model(folder):
    return Qwen2_5_VLForConditionalGeneration.from_pretrained(folder).eval()


def read(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_directory_is_an_ordinary_one(folder):
    assert sorted(read(folder)) == [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "preprocessor_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    _, info = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info


def test_sizes_suit_every_sharding(model):
    text, vision = model.config.text_config, model.config.vision_config
    assert (text.num_attention_heads, text.num_key_value_heads, text.vocab_size % 4) == (8, 4, 0)
    assert sum(text.rope_parameters["mrope_section"]) == text.hidden_size // text.num_attention_heads // 2
    assert (vision.num_heads, vision.fullatt_block_indexes) == (4, [1, 3])
    assert vision.window_size // vision.patch_size // vision.spatial_merge_size == 2
    assert model.get_output_embeddings().weight is not model.get_input_embeddings().weight


def test_token_ids_agree(folder, model):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = model.config
    assert len(tokenizer) < config.text_config.vocab_size
    names = tokenizer.convert_ids_to_tokens(
        [config.image_token_id, config.video_token_id, config.vision_start_token_id, config.vision_end_token_id]
    )
    assert names == ["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    for owner in (model.generation_config, config.text_config):
        ids = [owner.bos_token_id, owner.eos_token_id, owner.pad_token_id]
        assert tokenizer.convert_ids_to_tokens(ids) == ["<|endoftext|>", "<|im_end|>", "<|endoftext|>"]
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    for token in SPECIAL_TOKENS:
        assert tokenizer.decode(tokenizer(token)["input_ids"], skip_special_tokens=True) == ""
        assert len(tokenizer(f"a{token}b")["input_ids"]) == 3


@pytest.mark.parametrize("text", ["What colour is the circle?", "größer 12\n\n\t x", "😀"])
def test_any_text_survives_the_tokenizer(folder, text):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_the_corpus_is_compressed():
    tokenizer = make_tokenizer(CORPUS)
    assert tokenizer.tokenize("What colour is the circle?") == ["What", "Ġcolour", "Ġis", "Ġthe", "Ġcircle", "?"]


def test_the_chat_template():
    tokenizer = make_tokenizer(CORPUS)
    user = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What?"}]}
    assert tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What?<|im_end|>\n<|im_start|>assistant\n"
    )
    plain = [{"role": "system", "content": "Short."}, {"role": "user", "content": "Hi?"}]
    assert tokenizer.apply_chat_template(plain, tokenize=False) == (
        "<|im_start|>system\nShort.<|im_end|>\n<|im_start|>user\nHi?<|im_end|>\n"
    )


def test_plain_transformers_generates_from_it(folder, model):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    picture = AutoImageProcessor.from_pretrained(folder)(images=[Image.new("RGB", (90, 60))], return_tensors="pt")
    assert picture["pixel_values"].shape == (24, 3 * 2 * 14 * 14)
    assert picture["image_grid_thw"].tolist() == [[1, 4, 6]]
    text = "<|vision_start|>" + "<|image_pad|>" * 6 + "<|vision_end|>What?"
    inputs = tokenizer(text, return_tensors="pt")
    kinds = (inputs["input_ids"] == model.config.image_token_id).long()
    output = model.generate(**inputs, **picture, mm_token_type_ids=kinds, max_new_tokens=3, min_new_tokens=3)
    assert output.shape == (1, inputs["input_ids"].shape[1] + 3)


def test_the_seed_decides_the_weights_and_leaves_the_callers_alone(folder, tmp_path):
    torch.manual_seed(1)
    again = make_tiny_model(tmp_path / "again", CORPUS, seed=5)
    drawn = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(drawn, torch.rand(1))
    assert read(again) == read(folder)
    other = make_tiny_model(tmp_path / "other", CORPUS, seed=6)
    assert read(other)["model.safetensors"] != read(folder)["model.safetensors"]


def test_a_made_model_is_left_alone_and_anything_else_refused(folder, tmp_path):
    before = read(folder)
    assert make_tiny_model(folder, ["other"], seed=9) == folder
    assert read(folder) == before
    with pytest.raises(ModelError, match=f"{tmp_path} exists but holds no model"):
        make_tiny_model(tmp_path, CORPUS)


def test_an_interrupted_run_leaves_nothing(tmp_path, monkeypatch):
    def stop(tokenizer):
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny, "tiny_config", stop)
    with pytest.raises(KeyboardInterrupt):
        make_tiny_model(tmp_path / "tiny", CORPUS)
    assert list(tmp_path.iterdir()) == []


def test_two_makers_at_once_end_with_one_model(tmp_path, monkeypatch):
    rename = os.rename

    def late(source, destination):
        monkeypatch.setattr(os, "rename", rename)
        make_tiny_model(tmp_path / "tiny", CORPUS)  # the other maker finishes first
        rename(source, destination)

    monkeypatch.setattr(os, "rename", late)
    make_tiny_model(tmp_path / "tiny", CORPUS)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]
    assert json.loads((tmp_path / "tiny" / "config.json").read_text())["model_type"] == "qwen2_5_vl"
