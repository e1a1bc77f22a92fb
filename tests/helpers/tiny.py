"""Tiny models and hand-made samples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from dhp.data.sample import IGNORED, Sample

IMAGE_TOKEN = 505


def make_sample(
    grids: Sequence[tuple[int, int, int]], tokens: int, targets: int, seed: int, image_token: int
) -> Sample:
    """A sample with random pixels and text: some text, each image, `tokens` of text whose last `targets` are labels."""
    rng = np.random.default_rng(seed)
    text = lambda n: list(rng.integers(3, 300, n))
    ids: list[int] = text(2)
    kinds = [0, 0]
    for t, h, w in grids:
        ids += [image_token] * (t * h * w // 4) + text(1)
        kinds += [1] * (t * h * w // 4) + [0]
    ids += text(tokens)
    kinds += [0] * tokens
    labels = [IGNORED] * (len(ids) - targets) + ids[len(ids) - targets :]
    pixels = tuple(rng.standard_normal((t * h * w, 3 * 2 * 14 * 14)).astype(np.float32) for t, h, w in grids)
    as_array = lambda values: np.array(values, dtype=np.int64)
    return Sample("made", seed, as_array(ids), as_array(labels), as_array(kinds), pixels, tuple(grids))


def save_model(folder: Path, tied: bool = False, text: dict[str, Any] | None = None) -> Path:
    """A Qwen2.5-VL with random weights: 8 query and 4 key/value heads, 4 vision heads, 2 full-attention blocks."""
    decoder = {
        "vocab_size": 512,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    config = Qwen2_5_VLConfig(
        text_config=decoder | (text or {}),
        vision_config={
            "depth": 4,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 4,
            "window_size": 56,
            "fullatt_block_indexes": [1, 3],
            "out_hidden_size": 64,
        },
        image_token_id=IMAGE_TOKEN,
        video_token_id=506,
        vision_start_token_id=503,
        vision_end_token_id=504,
        tie_word_embeddings=tied,
    )
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(config)
    with torch.no_grad():  # biases and norms start at 0 and 1, where some mistakes do not show
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return folder
