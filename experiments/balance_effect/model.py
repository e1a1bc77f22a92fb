"""A Qwen2.5-VL with random weights, large enough that a step is computing and small enough for two cores."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import Qwen2_5_VLForConditionalGeneration
from transformers.utils import logging

from dhp.models.pretrained import load_tokenizer
from dhp.tiny.tiny_model import make_tiny_model, tiny_config

# Matrices of the tower take 1.8 million multiply-adds a patch, those of the decoder 5.9 million a token.
DECODER = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 8}
TOWER = {"hidden_size": 128, "intermediate_size": 352, "depth": 8, "fullatt_block_indexes": [3, 7]}


def make_model(folder: Path, corpus: Iterable[str]) -> Path:
    """A model directory in `folder`, with a tokenizer that learned `corpus`; return it."""
    logging.disable_progress_bar()  # one small file
    tiny = make_tiny_model(folder / "tiny", corpus)
    config = tiny_config(load_tokenizer(str(tiny)))
    for part, sizes in ((config.text_config, DECODER), (config.vision_config, TOWER)):
        for key, value in sizes.items():
            setattr(part, key, value)
    config.text_config.layer_types = ["full_attention"] * DECODER["num_hidden_layers"]
    config.text_config.rope_parameters["mrope_section"] = [4, 6, 6]  # half of a head's 32
    config.vision_config.out_hidden_size = DECODER["hidden_size"]
    torch.manual_seed(0)
    model = folder / "model"
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(model)
    for file in tiny.iterdir():
        if file.name != "config.json" and file.suffix != ".safetensors":
            (model / file.name).write_bytes(file.read_bytes())
    return model
