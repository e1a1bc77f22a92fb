"""Qwen2.5-VL 3B's shape with weights made on the device, samples for it, and what a dry run says of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import AutoConfig, PreTrainedModel, Qwen2_5_VLConfig

from dhp.batch.collate import Collator
from dhp.batch.encoder_shards import Split
from dhp.batch.shard import BatchSharder
from dhp.config.part import PartConfig
from dhp.config.shipped import shipped_directory
from dhp.core.batch import IGNORED, StepData
from dhp.core.generation import Sampling
from dhp.data.sample.sample import Sample
from dhp.data.sampling.dataset import StepSamples
from dhp.engine import encoder, text
from dhp.models.empty import part_shape
from dhp.models.load import drop_modules, drop_parameters, model_class
from dhp.models.registry import load_family
from dhp.parallel.tensor.styles import with_fused
from dhp.trainer.memory import Footprint, footprint
from experiments.gpu_check.setting import Setting
from experiments.pair import VISION, pair_of

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

    with patch.object(encoder, "load_part", build), patch.object(text, "load_part", build):
        yield


@dataclass(frozen=True)
class Sizes:
    """Of a micro-batch: samples of one image and so many tokens of text behind it, the half of which are targets."""

    samples: int
    grid: tuple[int, int, int]
    text_tokens: int


def sizes(setting: Setting, samples: int) -> Sizes:
    """`samples` of 4,896 patches and 1,524 tokens each; on a CPU, of 48 and 36."""
    return Sizes(samples, (1, 68, 72), 300) if setting.cuda else Sizes(samples, (1, 6, 8), 24)


def make_samples(folder: str, wanted: Sizes) -> tuple[Sample, ...]:
    """For the model of that directory; the same each time."""
    image_token = load_family(folder).processor.image_token_id
    return tuple(_sample(wanted, seed, image_token) for seed in range(wanted.samples))


def deal(setting: Setting, folder: str, samples: tuple[Sample, ...]) -> StepData:
    """One micro-batch; pixels travel in the format that the tower computes in, as in a run."""
    return _dealer(setting, folder).shard(StepSamples(0, 0, ((samples,),), ()))


def deal_prompt(setting: Setting, folder: str, sample: Sample, new_tokens: int) -> StepData:
    """One prompt, which nothing ends before it has so many new tokens."""
    return _dealer(setting, folder).shard_prompts(StepSamples(0, 0, (((sample,),),), ()), Sampling(new_tokens))


def _dealer(setting: Setting, folder: str) -> BatchSharder:
    family = load_family(folder)
    return BatchSharder(family, Collator(family, 0, packing=True), {VISION: Split(dtype=setting.format)})


def _sample(wanted: Sizes, seed: int, image_token: int) -> Sample:
    rng = np.random.default_rng(seed)
    patches = wanted.grid[0] * wanted.grid[1] * wanted.grid[2]
    text = rng.integers(3, 500, wanted.text_tokens)
    ids = np.concatenate([np.full(patches // 4, image_token), text]).astype(np.int64)
    labels = np.where(np.arange(len(ids)) < len(ids) - wanted.text_tokens // 2, IGNORED, ids)
    pixels = rng.standard_normal((patches, 3 * 2 * 14 * 14), dtype=np.float32)
    return Sample("made", seed, ids, labels, (ids == image_token).astype(np.int64), (pixels,), (wanted.grid,))


NEAR = 0.05  # relative: small tensors take whole blocks of the allocator, and plans and buffers are not counted


def footprint_of(setting: Setting, folder: str, part: str) -> Footprint:
    """Of the whole part of the model in that directory on one rank."""
    family = load_family(folder)
    own = family.parts[part]
    shape = part_shape(folder, family.outside(part), added_plan=with_fused(own.tensor_plan, own.fused))
    config = PartConfig(dtype=setting.format, data=1, ring=1, ulysses=1, tensor=1)
    return footprint(config, pair_of(family).stage(part), shape, own.head_shape([own.whole]), setting.cuda)


def agree(kept_bytes: int, *said: Footprint) -> bool:
    """Whether ranks keep so much between steps: weights, the optimizer's state, and what their gradients keep."""
    least = sum(one.states.weights + one.states.optimizer for one in said)
    return least * (1 - NEAR) <= kept_bytes <= sum(one.states.total for one in said) * (1 + NEAR)
