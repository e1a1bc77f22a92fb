"""Samples for a family of which only the configuration is known."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from transformers import AutoConfig

from dhp.base.geometry import IGNORED
from dhp.data.sample import Sample
from dhp.models.generic.forms import pack
from dhp.models.generic.pictures import row_values
from dhp.models.generic.rows import make_row
from dhp.models.generic.twin_model import Twin


class Maker:
    """Samples of a tiny model's family, by the pictures that its encoder takes."""

    def __init__(self, model: str):
        self._config = AutoConfig.from_pretrained(model)
        self._twin, self._values = Twin(self._config), row_values(self._config)

    def sample(self, pictures: Sequence[int], targets: int, seed: int) -> Sample:
        """Pictures by their numbers; the last `targets` tokens are labels."""
        counts = [self._twin.tokens(number) for number in pictures]
        ids, kinds = (row[0].numpy() for row in make_row(self._config, counts, seed))
        labels = np.where(np.arange(len(ids)) < len(ids) - targets, IGNORED, ids)
        packed = []
        for number, count in zip(pictures, counts, strict=True):
            arrays = {name: tensor.numpy() for name, tensor in self._twin.picture(number).items()}
            packed.append(pack(arrays, count, self._values))
        pixels, forms = zip(*packed, strict=True) if packed else ((), ())
        return Sample("made", seed, ids, labels, kinds, tuple(pixels), tuple(forms))

    def steps(self) -> list[list[Sample]]:
        """One picture, several, none at all; a step without any; fewer pictures than ranks."""
        make = self.sample
        return [
            [make([0], 3, 1), make([1, 2, 3], 4, 2), make([], 1, 3), make([4], 2, 4)],
            [make([], targets, 10 + targets) for targets in (5, 2, 4, 3)],
            [make([], 5, 21), make([5], 4, 22), make([], 3, 23), make([], 1, 24)],
        ]
