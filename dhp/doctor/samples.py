"""Samples for a model of which only the configuration is known, with pictures as its encoder takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dhp.base.geometry import IGNORED, Form
from dhp.data.sample import Sample
from dhp.models.family import Family
from dhp.models.generic.declared import token_types
from dhp.models.generic.forms import pack, unpack
from dhp.models.generic.pictures import joined, row_values
from dhp.models.generic.processor import ContractProcessor
from dhp.models.generic.rows import kinds_for, make_row
from dhp.models.generic.twin_model import Twin


class SampleMaker:
    """Makes samples for one twin."""

    def __init__(self, twin: Twin, family: Family):
        self._twin, self._family = twin, family

    def sample(self, pictures: Sequence[int], targets: int, seed: int) -> Sample:
        """Pictures by their numbers, in a conversation whose last `targets` tokens are to be learned."""
        counts = [self._twin.tokens(number) for number in pictures]
        ids, kinds = (row[0].numpy() for row in make_row(self._twin.config, counts, seed))
        labels = np.where(np.arange(len(ids)) < len(ids) - targets, IGNORED, ids)
        shown = [self._picture(number, count) for number, count in zip(pictures, counts, strict=True)]
        pixels, grids = zip(*shown, strict=True) if shown else ((), ())
        return Sample("made", seed, ids, labels, kinds, tuple(pixels), tuple(grids))

    def samples(self) -> list[Sample]:
        """A picture, several, and none at all."""
        return [self.sample([0], 4, seed=1), self.sample([], 3, seed=2), self.sample([1, 2], 5, seed=3)]

    def _picture(self, number: int, tokens: int) -> tuple[np.ndarray, Any]:
        arrays = {name: t.numpy() for name, t in self._twin.picture(number).items() if t is not None}
        if isinstance(self._family.processor, ContractProcessor):
            return pack(arrays, tokens, row_values(self._twin.config))
        return self._family.processor.patches(arrays)


def plain_inputs(family: Family, forward: Any, sample: Sample, dtype: torch.dtype) -> dict[str, Tensor]:
    """The arguments of the plain model for one sample."""
    kinds = torch.from_numpy(sample.mm_token_type_ids)[None]
    kinds = token_types(family.config, kinds, torch.from_numpy(sample.labels)[None])
    ids = torch.from_numpy(sample.input_ids)[None]
    inputs: dict[str, Tensor] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if not sample.pixels:
        return inputs | kinds_for(forward, kinds)
    if isinstance(sample.grids[0], Form):
        pairs = zip(sample.grids, sample.pixels, strict=True)
        return inputs | joined([unpack(f, torch.from_numpy(p), dtype) for f, p in pairs]) | kinds_for(forward, kinds)
    inputs |= {
        "pixel_values": torch.cat([torch.from_numpy(pixels) for pixels in sample.pixels]).to(dtype),
        "image_grid_thw": torch.tensor(sample.grids),
    }
    told: Mapping[str, Tensor] = inputs | {"mm_token_type_ids": kinds}
    return family.processor.plain_inputs(dict(told)) | kinds_for(forward, kinds)
