"""The model and the samples of a step, with random weights, pixels and words."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from dhp.batch.encoder_shards import Split
from dhp.batch.reader import BatchReader
from dhp.core.axes import Degrees
from dhp.core.batch import IGNORED, StepData
from dhp.data.sample.sample import Sample
from dhp.data.sampling.dataset import StepSamples
from dhp.data.sampling.sampler import BatchLayout, slots
from dhp.models.registry import load_family

IMAGE, START, END, VIDEO = 2040, 2041, 2042, 2043
HEADS = 4
PATCH_VALUES = 3 * 2 * 14 * 14


def make_model(folder: Path, tower: int, decoder: int, layers: int, tower_layers: int | None = None) -> str:
    """A Qwen2.5-VL whose parts are `tower` and `decoder` wide, with `layers` layers each or `tower_layers` in the
    tower, of which every fourth one has full attention."""
    depth = tower_layers or layers
    half = decoder // HEADS // 2
    text = {
        "vocab_size": 2048,
        "hidden_size": decoder,
        "intermediate_size": 11 * decoder // 4,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "mrope_section": [half - 2 * (half // 3), half // 3, half // 3],
        },
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    }
    vision = {
        "depth": depth,
        "hidden_size": tower,
        "intermediate_size": 11 * tower // 4,
        "num_heads": HEADS,
        "fullatt_block_indexes": list(range(3, depth, 4)),
        "out_hidden_size": decoder,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    made = folder / f"{tower}-{decoder}-{depth}-{layers}"
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(made)
    return str(made)


def make_samples(count: int, side: int, words: int) -> list[Sample]:
    """Samples with one image of side × side patches and `words` words each, half of them targets."""
    return [make_sample(side, words, seed) for seed in range(count)]


def make_sample(side: int, words: int, seed: int) -> Sample:
    """One of them, drawn by its seed."""
    rng = np.random.default_rng(seed)
    text = rng.integers(3, 2000, words)
    ids = np.concatenate([[5], np.full(side * side // 4, IMAGE), text])
    labels = np.full(len(ids), IGNORED)
    labels[-words // 2 :] = text[-words // 2 :]
    pixels = rng.standard_normal((side * side, PATCH_VALUES), dtype=np.float32)
    kinds = (ids == IMAGE).astype(np.int64)
    return Sample("made", seed, ids.astype(np.int64), labels.astype(np.int64), kinds, (pixels,), ((1, side, side),))


def deal(
    model: str, vision: Degrees, text: Degrees, samples: Sequence[Sample], micro_batches: int, packing: bool = True
) -> StepData:
    """The step's samples dealt out to the ranks of both parts."""
    return feed_of(model, vision, text, lambda: samples, micro_batches, packing).step(0)


def feed_of(
    model: str,
    vision: Degrees,
    text: Degrees,
    read: Callable[[], Sequence[Sample]],
    micro_batches: int,
    packing: bool = True,
) -> BatchReader:
    """Steps of the samples that `read` gives, dealt out to the ranks of both parts."""

    def step(k: int) -> StepSamples:
        samples = read()
        size = -(-len(samples) // (micro_batches * text.data))
        dealt = slots(list(samples), BatchLayout(text.data, micro_batches, size))
        return StepSamples(k, 0, tuple(tuple(tuple(slot) for slot in row) for row in dealt), ())

    source: Any = SimpleNamespace(step=step)
    return BatchReader(
        source, load_family(model), 0, {"vision": Split(vision.data, vision.sequence, stages=2)}, packing
    )
