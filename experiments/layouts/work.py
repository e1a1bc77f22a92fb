"""The work that every layout does: two model shapes, and batches of two samples with one image each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from dhp.core.batch import IGNORED
from dhp.data.sample.sample import Sample

IMAGE, START, END, VIDEO = 2040, 2041, 2042, 2043
SAMPLES, TEXT_TOKENS, TARGETS = 2, 48, 32
SIDES = {"1k": 32, "4k": 64, "9k": 96, "16k": 128}  # patches along one side of the image

# Matrices of the tower against those of the decoder, multiply-adds a patch (a decoder token is four patches):
# about 4.6 to 1, and about 1.1 to 1; the tower's full attention comes on top and grows with the image.
TOWER = {"depth": 6, "hidden_size": 128, "intermediate_size": 384, "num_heads": 4, "fullatt_block_indexes": [5]}
DECODERS = {
    "vision-dominated": {"hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 384},
    "balanced": {"hidden_size": 320, "num_hidden_layers": 4, "intermediate_size": 768},
}


@dataclass(frozen=True)
class Run:
    """Steps of one batch. seconds: of each step that counts. loss: of the last one.

    peak_bytes: the most that activations took on a rank's device, and sent_bytes: what all ranks sent in a step; both
    None where only time was taken.
    """

    seconds: tuple[float, ...]
    loss: float
    peak_bytes: int | None = None
    sent_bytes: int | None = None


def make_model(folder: Path, shape: str) -> Path:
    """A Qwen2.5-VL of that shape with random weights."""
    text = DECODERS[shape]
    half = text["hidden_size"] // 8 // 2
    decoder = {
        "vocab_size": 2048,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [half - 2 * (half // 3), half // 3, half // 3],
        },
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    config = Qwen2_5_VLConfig(
        text_config=decoder | text,
        vision_config=TOWER | {"out_hidden_size": text["hidden_size"]},
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder / shape)
    return folder / shape


def make_batch(size: str) -> list[Sample]:
    """The samples of a step, with images of `size` patches each."""
    side = SIDES[size]
    return [make_sample((1, side, side), seed) for seed in range(SAMPLES)]


def make_sample(grid: tuple[int, int, int], seed: int) -> Sample:
    """One sample whose only image has that grid: frames, rows, columns of patches."""
    rng = np.random.default_rng(seed)
    patches = grid[0] * grid[1] * grid[2]
    text = rng.integers(3, 2000, TEXT_TOKENS)
    ids = np.concatenate([[5], np.full(patches // 4, IMAGE), text])
    labels = np.concatenate([np.full(len(ids) - TARGETS, IGNORED), text[-TARGETS:]])
    kinds = (ids == IMAGE).astype(np.int64)
    pixels = rng.standard_normal((patches, 3 * 2 * 14 * 14), dtype=np.float32)
    return Sample("made", seed, ids.astype(np.int64), labels.astype(np.int64), kinds, (pixels,), (grid,))


def count_tokens(samples: Sequence[Sample]) -> int:
    """Tokens of the decoder."""
    return sum(len(sample.input_ids) for sample in samples)
