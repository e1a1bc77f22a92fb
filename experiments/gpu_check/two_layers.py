"""Two real layers of each part of Qwen2.5-VL 3B with random weights, in this process: on a CPU, tiny ones."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from dhp.base.geometry import IGNORED
from dhp.base.messages import Bundle, StepData
from dhp.batching.collate import Collator
from dhp.batching.scatter import Dealer
from dhp.config.shipped import shipped_directory
from dhp.data.sample import Sample
from dhp.data.source import StepSamples
from dhp.models.registry import load_family
from dhp.trainers.settings import OptimizerSettings, StageSettings
from dhp.trainers.text import TextTrainer
from dhp.trainers.vision import VisionTrainer
from experiments.gpu_check.setting import Setting
from experiments.pair import TEXT, VISION, pair_of, settings_of

SHAPE = "model/shapes/Qwen/Qwen2.5-VL-3B-Instruct.json"
LAYERS = 2  # of the tower, the first attends to windows and the second to whole images
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8, "num_key_value_heads": 4}
TINY_TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 64}
UPDATE = OptimizerSettings(1e-4, (0.9, 0.999), 1e-8, 0.01, "constant", 0, 10**6, None)


def make_model(setting: Setting) -> str:
    """Its directory; written once, in 16 bits."""
    folder = setting.folder / "two_layers"
    if not folder.exists():
        torch.manual_seed(0)
        with torch.device(setting.device):
            model = Qwen2_5_VLForConditionalGeneration(_config(setting)).to(torch.bfloat16)
        partial = folder.with_name("unfinished")
        model.save_pretrained(partial)
        partial.rename(folder)
    return str(folder)


def _config(setting: Setting) -> Qwen2_5_VLConfig:
    shape = json.loads((Path(shipped_directory()) / SHAPE).read_text(encoding="utf-8"))
    text, vision = shape["text_config"], shape["vision_config"]
    text |= {"num_hidden_layers": LAYERS}
    vision |= {"depth": LAYERS, "fullatt_block_indexes": [LAYERS - 1]}
    width = text["hidden_size"] // text["num_attention_heads"] // 2
    if not setting.cuda:
        text |= TINY | {"vocab_size": 512}
        vision |= TINY_TOWER
        width = text["hidden_size"] // text["num_attention_heads"] // 2
        shape["image_token_id"] = 505
    sections = [width - 2 * (3 * width // 8), 3 * width // 8, 3 * width // 8]
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    return Qwen2_5_VLConfig(**{key: value for key, value in shape.items() if key != "model_type"})


@dataclass(frozen=True)
class Sizes:
    """Of a micro-batch: samples of one image and so many tokens of text behind it, the half of which are targets."""

    samples: int
    grid: tuple[int, int, int]
    text_tokens: int

    @property
    def patches(self) -> int:
        return self.samples * self.grid[0] * self.grid[1] * self.grid[2]


def sizes(setting: Setting, samples: int) -> Sizes:
    """`samples` of 4,896 patches and 1,524 tokens each; on a CPU, of 48 and 36."""
    return Sizes(samples, (1, 68, 72), 300) if setting.cuda else Sizes(samples, (1, 6, 8), 24)


def deal(model: str, wanted: Sizes) -> StepData:
    """One micro-batch for one rank of each part."""
    family = load_family(model)
    samples = tuple(_sample(wanted, seed, family.processor.image_token_id) for seed in range(wanted.samples))
    return Dealer(family, Collator(family, 0, packing=True)).deal(StepSamples(0, 0, ((samples,),), ()))


def _sample(wanted: Sizes, seed: int, image_token: int) -> Sample:
    rng = np.random.default_rng(seed)
    patches = wanted.grid[0] * wanted.grid[1] * wanted.grid[2]
    text = rng.integers(3, 500, wanted.text_tokens)
    ids = np.concatenate([np.full(patches // 4, image_token), text]).astype(np.int64)
    labels = np.where(np.arange(len(ids)) < len(ids) - wanted.text_tokens // 2, IGNORED, ids)
    pixels = rng.standard_normal((patches, 3 * 2 * 14 * 14), dtype=np.float32)
    return Sample("made", seed, ids, labels, (ids == image_token).astype(np.int64), (pixels,), (wanted.grid,))


def settings(setting: Setting, part: str, recompute: str) -> StageSettings:
    """One rank of the part."""
    model, dtype = make_model(setting), "bfloat16" if setting.cuda else "float32"
    chain = pair_of(load_family(model))
    return settings_of(chain, part, model, UPDATE, recompute, dtype=dtype, device=setting.device)


@cache
def _join() -> None:
    """A group of this process alone."""
    os.environ["LOCAL_RANK"] = "0"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def start(setting: Setting, part: str, recompute: str) -> Any:
    """A trainer of that part."""
    _join()
    trainer = VisionTrainer if part == VISION else TextTrainer
    return trainer(settings(setting, part, recompute))


class OnePart:
    """One part on given work, over and over: forward, backward, nothing kept."""

    def __init__(self, setting: Setting, part: str, recompute: str, wanted: Sizes):
        self.sizes, self.data = wanted, deal(make_model(setting), wanted)
        self.trainer = start(setting, part, recompute)
        self._of_text, dtype = part == TEXT, self.trainer.dtype
        rows = sum(self.data.work[VISION][0][0].rows)
        hidden = self.trainer.family.config.get_text_config().hidden_size
        # What the other part hands over: embeddings, or their gradient.
        self._given = torch.randn(rows, hidden).to(dtype).to(setting.device)
        work = self.data.work[part][0][0]
        self._work = work if self._of_text else replace(work, pixels=_pinned(work.pixels, setting))

    def forward(self) -> None:
        """One micro-batch."""
        if self._of_text:
            self.trainer.forward_step(0, 0, self._work, Bundle({"embeddings": self._given.detach()}))
        else:
            self.trainer.forward_step(0, 0, self._work)

    def backward(self) -> None:
        """Back through it. It is the last of its step."""
        if self._of_text:
            self.trainer.backward_step(0, 0, True)
        else:
            self.trainer.backward_step(0, 0, True, Bundle({"embeddings": self._given}))

    def forget(self) -> None:
        """Drop the gradients."""
        self.trainer.optimizer.drop()
        if self._of_text:
            self.trainer._losses.clear()

    def update(self) -> None:
        """An optimizer step instead."""
        self.trainer.grad_norm_sq(self.data.info)
        self.trainer.optimizer_step(self.data.info, 0.0)


def _pinned(tensor: Tensor, setting: Setting) -> Tensor:
    return tensor.pin_memory() if setting.cuda else tensor
