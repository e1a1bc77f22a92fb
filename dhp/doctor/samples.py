"""Samples for a model of which only the configuration is known, with pictures as its encoder takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dhp.base.geometry import IGNORED, ProcessorOutput
from dhp.batching.collate import sounds_by_argument
from dhp.data.sample import Sample
from dhp.models.audio import clip_forms
from dhp.models.family import Family
from dhp.models.generic.declared import token_types
from dhp.models.generic.forms import pack, unpack
from dhp.models.generic.pictures import joined, row_values
from dhp.models.generic.processor import ContractProcessor
from dhp.models.generic.rows import kinds_for, make_row
from dhp.models.generic.twin_model import ProbeModel


class SampleMaker:
    """Makes samples for one twin."""

    def __init__(self, twin: ProbeModel, family: Family):
        self._twin, self._family = twin, family

    def sample(self, pictures: Sequence[int], targets: int, seed: int, clips: Sequence[int] = ()) -> Sample:
        """Pictures by their numbers, and clips of so many frames for a model with an audio part, in a conversation
        whose last `targets` tokens are to be learned."""
        counts = [self._twin.tokens(number) for number in pictures]
        forms = clip_forms(clips, self._twin.config) if clips else []
        clip_tokens = [form.tokens for form in forms]
        ids, kinds = (row[0].numpy() for row in make_row(self._twin.config, counts, seed, clip_tokens))
        labels = np.where(np.arange(len(ids)) < len(ids) - targets, IGNORED, ids)
        shown = [self._picture(number, count) for number, count in zip(pictures, counts, strict=True)]
        pixels, grids = zip(*shown, strict=True) if shown else ((), ())
        sounds = tuple(_sound(form, seed + at) for at, form in enumerate(forms))
        return Sample(
            "made", seed, ids, labels, kinds, tuple(pixels), tuple(grids), clips=sounds, clip_forms=tuple(forms)
        )

    def samples(self) -> list[Sample]:
        """A picture, several, and none at all; for a model with an audio part, clips too, alone and with a picture."""
        seen = [self.sample([0], 4, seed=1), self.sample([], 3, seed=2), self.sample([1, 2], 5, seed=3)]
        if self._family.processor.hearing is None:
            return seen
        return [*seen, self.sample([], 3, seed=4, clips=[30, 130]), self.sample([1], 3, seed=5, clips=[40])]

    def _picture(self, number: int, tokens: int) -> tuple[np.ndarray, Any]:
        arrays = {name: t.numpy() for name, t in self._twin.picture(number).items() if t is not None}
        if isinstance(self._family.processor, ContractProcessor):
            return pack(arrays, tokens, row_values(self._twin.config))
        return self._family.processor.patches(arrays)


def _sound(form: ProcessorOutput, seed: int) -> np.ndarray:
    ((_, shape),) = form.pixels
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def sound_inputs(sample: Sample, dtype: torch.dtype) -> dict[str, Tensor]:
    """A sample's clips as the plain model's own arguments."""
    found = sounds_by_argument((sample,))
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in found.items()}


def plain_inputs(family: Family, forward: Any, sample: Sample, dtype: torch.dtype) -> dict[str, Tensor]:
    """The arguments of the plain model for one sample."""
    kinds = torch.from_numpy(sample.mm_token_type_ids)[None]
    kinds = token_types(family.config, kinds, torch.from_numpy(sample.labels)[None])
    ids = torch.from_numpy(sample.input_ids)[None]
    inputs: dict[str, Tensor] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs |= sound_inputs(sample, dtype)
    if not sample.pixels:
        return inputs | kinds_for(forward, kinds)
    if isinstance(sample.grids[0], ProcessorOutput):
        pairs = zip(sample.grids, sample.pixels, strict=True)
        return inputs | joined([unpack(f, torch.from_numpy(p), dtype) for f, p in pairs]) | kinds_for(forward, kinds)
    inputs |= {
        "pixel_values": torch.cat([torch.from_numpy(pixels) for pixels in sample.pixels]).to(dtype),
        "image_grid_thw": torch.tensor(sample.grids),
    }
    named: Mapping[str, Tensor] = inputs | {"mm_token_type_ids": kinds}
    return family.processor.plain_inputs(dict(named)) | kinds_for(forward, kinds)
