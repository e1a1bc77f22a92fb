"""Samples made by hand: one image each and text behind it, as a step's work for one rank of each part."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dhp.batch.collate import Collator
from dhp.batch.encoder_shards import Split
from dhp.batch.shard import BatchSharder
from dhp.core.batch import IGNORED, Sampling, StepData
from dhp.data.sample.sample import Sample
from dhp.data.sampling.dataset import StepSamples
from dhp.models.registry import load_family
from experiments.gpu_check.setting import Setting
from experiments.pair import VISION


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
