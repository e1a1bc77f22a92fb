"""Qwen2.5-VL 3B's shape, whole or with few layers, and random weights that are made on the device: no file is read."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoConfig, PreTrainedModel, Qwen2_5_VLConfig

from dhp.config.devices import shipped_directory
from dhp.engine import encoder_engine, text_engine
from dhp.models.load import drop_modules, drop_parameters, model_class
from experiments.gpu_check.setting import Setting

SHAPE = "model/shapes/Qwen/Qwen2.5-VL-3B-Instruct.json"
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4}
TINY_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 64}
TINY_DEPTH = 2  # of what has full depth on a GPU


def make_shape(setting: Setting, layers: int | None = None) -> str:
    """A directory with the configuration alone. layers: of each part; None: as many as the model has, on a CPU two.
    On a CPU the layers are tiny."""
    depth = layers if layers is not None or setting.cuda else TINY_DEPTH
    folder = setting.folder / f"shape_{depth or 'whole'}"
    if not folder.exists():
        _config(setting, depth).save_pretrained(folder)
    return str(folder)


def _config(setting: Setting, depth: int | None) -> Qwen2_5_VLConfig:
    shape = json.loads((Path(shipped_directory()) / SHAPE).read_text(encoding="utf-8"))
    decoder, tower = shape["text_config"], shape["vision_config"]
    if depth is not None:
        decoder |= {"num_hidden_layers": depth}
        # Of the last layers each attends to whole images, as every eighth one does.
        tower |= {"depth": depth, "fullatt_block_indexes": [depth - 1]}
    if not setting.cuda:
        decoder |= TINY | {"vocab_size": 512}
        tower |= TINY_TOWER
        shape["image_token_id"] = 505
    half = decoder["hidden_size"] // decoder["num_attention_heads"] // 2
    sections = [half - 2 * (3 * half // 8), 3 * half // 8, 3 * half // 8]
    decoder["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    return Qwen2_5_VLConfig(**{key: value for key, value in shape.items() if key != "model_type"})


def build_whole(folder: str, dtype: torch.dtype, device: str) -> PreTrainedModel:
    """The plain model with random weights, the same each time."""
    torch.manual_seed(0)
    with torch.device(device):
        return model_class(folder)._from_config(
            AutoConfig.from_pretrained(folder, trust_remote_code=False), dtype=dtype, attn_implementation="sdpa"
        )


@contextmanager
def built_on(device: str) -> Iterator[None]:
    """In the block, a stage of one rank builds its weights in the place of reading them."""

    def build(folder: str, dropped: Sequence[str], dtype: torch.dtype, *_: Any) -> PreTrainedModel:
        model = build_whole(folder, dtype, device)
        drop_modules(model, dropped)
        drop_parameters(model, dropped)
        return model.train()

    with patch.object(encoder_engine, "load_part", build), patch.object(text_engine, "load_part", build):
        yield
