"""Samples for a family of which only the configuration is known."""

from collections.abc import Sequence

from transformers import AutoConfig

from dhp.data.sample.sample import Sample
from dhp.doctor.trial import SampleMaker
from dhp.models.contract.twin import ProbeModel
from dhp.models.registry import load_family


class Maker:
    """Samples of a tiny model's family, by the pictures that its encoder takes."""

    def __init__(self, model: str):
        self._maker = SampleMaker(ProbeModel(AutoConfig.from_pretrained(model)), load_family(model))

    def sample(
        self, pictures: Sequence[int], targets: int, seed: int, clips: Sequence[int] = (), videos: Sequence[int] = ()
    ) -> Sample:
        """Pictures by their numbers, clips and videos by their frames; the last `targets` tokens are labels."""
        return self._maker.sample(pictures, targets, seed, clips, videos)

    def steps(self, everywhere: bool = False) -> list[list[Sample]]:
        """One picture, several, none at all; a step without any; fewer pictures than ranks. everywhere: no sample is
        without."""
        make, none = self.sample, [3] if everywhere else []
        return [
            [make([0], 3, 1), make([1, 2, 3], 4, 2), make(none, 1, 3), make([4], 2, 4)],
            [make(none, targets, 10 + targets) for targets in (5, 2, 4, 3)],
            [make(none, 5, 21), make([5], 4, 22), make(none, 3, 23), make(none, 1, 24)],
        ]

    def heard_steps(self) -> list[list[Sample]]:
        """For a model that hears: sound alone, beside a picture, several clips of several chunks, neither; then a step
        without sound, one with sound alone in fewer samples than ranks, and one without either."""
        make = self.sample
        return [
            [make([0], 3, 1, [130]), make([], 4, 2, [250, 40]), make([1, 2], 2, 3), make([], 2, 4)],
            [make([0], 4, 11), make([], 2, 12), make([], 3, 13), make([3, 4], 3, 14)],
            [make([], 2, 21), make([], 3, 22, [60, 20, 330]), make([], 1, 23), make([], 5, 24)],
        ]
