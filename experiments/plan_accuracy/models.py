"""Small models with random weights, and samples that are all alike, so that a step's loads are known exactly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

from dhp.core.batch import IGNORED
from dhp.data.sample.sample import Sample

IMAGE, START, END, VIDEO, WORDS = 2040, 2041, 2042, 2043, 2000
MERGED = 4  # patches of a token


@dataclass(frozen=True)
class Shape:
    """Of a model: layers, width and inner width of both parts. experts: in each of the decoder's layers; 0: none."""

    tower: tuple[int, int, int]
    decoder: tuple[int, int, int]
    experts: int = 0


SHAPES = {
    "balanced": Shape((4, 128, 384), (4, 256, 704)),
    "decoder": Shape((2, 64, 128), (6, 320, 1024)),
    "tower": Shape((8, 192, 640), (2, 128, 320)),
    "experts": Shape((3, 128, 384), (3, 128, 192), 4),
}


@dataclass(frozen=True)
class Load:
    """A sample: patches along the sides of its picture, words, and how many of these are learned."""

    rows: int
    columns: int
    words: int = 48
    targets: int = 32

    @property
    def features(self) -> int:
        """Tokens of the picture."""
        return self.rows * self.columns // MERGED

    @property
    def tokens(self) -> int:
        """All of them; one begins the sample."""
        return 1 + self.features + self.words


def save_model(folder: Path, name: str, shapes: Mapping[str, Shape] = SHAPES) -> str:
    """A model of one of these shapes, made where it is not there yet."""
    path = folder / name
    if not path.is_dir():
        torch.manual_seed(0)
        AutoModelForImageTextToText.from_config(_config(shapes[name])).save_pretrained(path)
    return str(path)


def _config(shape: Shape) -> Any:
    (depth, width, inner), (layers, hidden, between) = shape.tower, shape.decoder
    half = hidden // 8 // 2
    text = {
        "vocab_size": 2048,
        "hidden_size": hidden,
        "intermediate_size": between,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [half - 2 * (half // 3), half // 3, half // 3],
        },
    }
    vision = {"depth": depth, "hidden_size": width, "intermediate_size": inner, "num_heads": 4}
    vision |= {"out_hidden_size": hidden}
    places = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START}
    places |= {"vision_end_token_id": END}
    if not shape.experts:
        vision["fullatt_block_indexes"] = [depth - 1]
        return CONFIG_MAPPING["qwen2_5_vl"](text_config=text, vision_config=vision, tie_word_embeddings=False, **places)
    text |= {"num_experts": shape.experts, "num_experts_per_tok": 2, "moe_intermediate_size": between}
    text |= {"head_dim": hidden // 8, "decoder_sparse_step": 1, "mlp_only_layers": []}
    vision |= {"patch_size": 14, "deepstack_visual_indexes": [1], "num_position_embeddings": 1024}
    return CONFIG_MAPPING["qwen3_vl_moe"](text_config=text, vision_config=vision, tie_word_embeddings=False, **places)


def make_samples(load: Load, count: int) -> list[Sample]:
    """So many samples of that load."""
    return [_sample(load, seed) for seed in range(count)]


def _sample(load: Load, seed: int) -> Sample:
    random = np.random.default_rng(seed)
    text = random.integers(3, WORDS, load.words)
    ids = np.concatenate([[5], np.full(load.features, IMAGE), text])
    labels = np.concatenate([np.full(len(ids) - load.targets, IGNORED), text[load.words - load.targets :]])
    kinds = (ids == IMAGE).astype(np.int64)
    pixels = random.standard_normal((load.rows * load.columns, 3 * 2 * 14 * 14), dtype=np.float32)
    grid = (1, load.rows, load.columns)
    return Sample("made", seed, ids.astype(np.int64), labels.astype(np.int64), kinds, (pixels,), (grid,))
