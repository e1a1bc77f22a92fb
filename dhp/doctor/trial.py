"""Runs one tiny step plainly and by engines, and compares."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel

from dhp.batch.collate import Collator
from dhp.batch.encoder_shards import VISION, Split
from dhp.batch.shard import BatchSharder, Division
from dhp.config.data import DataConfig
from dhp.config.schema import Config, PartConfig
from dhp.core.axes import Degrees
from dhp.core.batch import IGNORED, ProcessorOutput
from dhp.core.graph import Edge, Node, StageGraph, StageSpec
from dhp.core.wrapping import wrappers_of
from dhp.data.sample.sample import Sample
from dhp.data.sampling.dataset import StepSamples
from dhp.doctor.plain_model import plain_gradients
from dhp.engine.engines import make_rank
from dhp.engine.stage_settings import OptimizerSettings, StageSettings
from dhp.models.contract.clips import clip_form
from dhp.models.contract.generic_processor import ContractProcessor
from dhp.models.contract.random_pictures import pack, row_values
from dhp.models.contract.random_rows import make_row
from dhp.models.contract.twin import ProbeModel
from dhp.models.family import Family
from dhp.models.processor import clip_forms


class SampleMaker:
    """Makes samples for one twin."""

    def __init__(self, twin: ProbeModel, family: Family):
        self._twin, self._family = twin, family

    def sample(
        self, pictures: Sequence[int], targets: int, seed: int, clips: Sequence[int] = (), videos: Sequence[int] = ()
    ) -> Sample:
        """Pictures by their numbers, clips of so many frames for a model with an audio part, and videos of so many, in
        a conversation whose last `targets` tokens are to be learned."""
        counts = [self._twin.tokens(number) for number in pictures]
        moving = [self._twin.video_tokens(frames) for frames in videos]
        forms = self._clip_forms(clips)
        clip_tokens = [form.tokens for form in forms]
        ids, kinds = (row[0].numpy() for row in make_row(self._twin.config, counts, seed, clip_tokens, moving))
        labels = np.where(np.arange(len(ids)) < len(ids) - targets, IGNORED, ids)
        shown = [self._picture(number, count) for number, count in zip(pictures, counts, strict=True)]
        shown += [self._pack(self._twin.video(frames), count) for frames, count in zip(videos, moving, strict=True)]
        pixels, grids = zip(*shown, strict=True) if shown else ((), ())
        sounds = tuple(_sound(form, seed + at) for at, form in enumerate(forms))
        seconds = (None,) * len(pictures) + (1.0,) * len(videos)
        return Sample(
            "made",
            seed,
            ids,
            labels,
            kinds,
            tuple(pixels),
            tuple(grids),
            seconds,
            clips=sounds,
            clip_forms=tuple(forms),
        )

    def samples(self) -> list[Sample]:
        """A picture, several, and none at all; videos too, where frames of them are encoded as pictures are; for a
        model with an audio part, clips too, alone and with a picture."""
        seen = [self.sample([0], 4, seed=1), self.sample([], 3, seed=2), self.sample([1, 2], 5, seed=3)]
        if self._twin.videos:
            seen += [self.sample([], 3, seed=6, videos=[3]), self.sample([1], 4, seed=7, videos=[2, 2])]
        if self._family.processor.hearing is None:
            return seen
        return [*seen, self.sample([], 3, seed=4, clips=[30, 130]), self.sample([1], 3, seed=5, clips=[40])]

    def _clip_forms(self, clips: Sequence[int]) -> list[ProcessorOutput]:
        if isinstance(self._family.processor, ContractProcessor):
            return [clip_form(frames, self._twin.bins, self._twin.clip_tokens(frames)) for frames in clips]
        return clip_forms(clips, self._twin.config) if clips else []

    def _picture(self, number: int, tokens: int) -> tuple[np.ndarray, Any]:
        if isinstance(self._family.processor, ContractProcessor):
            return self._pack(self._twin.picture(number), tokens)
        arrays = {name: t.numpy() for name, t in self._twin.picture(number).items() if t is not None}
        return self._family.processor.patches(arrays)

    def _pack(self, arguments: Mapping[str, Tensor | None], tokens: int) -> tuple[np.ndarray, Any]:
        arrays = {name: t.numpy() for name, t in arguments.items() if t is not None}
        return pack(arrays, tokens, row_values(self._twin.config))


def _sound(form: ProcessorOutput, seed: int) -> np.ndarray:
    ((_, shape),) = form.pixels
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


_UPDATE = OptimizerSettings(1e-3, (0.9, 0.999), 1e-8, 0.0, "constant", 0, 1, None)
_FLOOR = 1e-6  # of the norm of all gradients: what a gradient below it deviates by is rounding


@dataclass(frozen=True)
class TrialResult:
    """The objective of a step, and gradients by the parameters' names. wrapped: see `wrappers_of`."""

    loss: float
    gradients: Mapping[str, Tensor]
    wrapped: Mapping[tuple[str, str], int] = field(default_factory=dict)

    def deviation(self, wanted: TrialResult) -> float:
        """The largest relative deviation of the loss and of any gradient; infinite where one is no number."""
        norm = float(torch.stack([g.norm() for g in wanted.gradients.values()]).norm())
        worst = abs(self.loss - wanted.loss) / (abs(wanted.loss) or 1.0)
        for name in self.gradients.keys() | wanted.gradients.keys():
            found, expected = self.gradients.get(name), wanted.gradients.get(name)
            difference = found if expected is None else expected if found is None else found - expected
            assert difference is not None  # one of the two has it
            size = max(0.0 if expected is None else float(expected.norm()), _FLOOR * norm)
            found_error = float(difference.norm()) / (size or 1.0)
            worst = max(worst, math.inf if math.isnan(found_error) else found_error)  # max() would pass over it
        return math.inf if math.isnan(worst) else worst


def run_whole(model: PreTrainedModel, family: Family, samples: Sequence[Sample]) -> TrialResult:
    """The plain model."""
    return TrialResult(*plain_gradients(model, family, samples))


def run_parts(folder: str, family: Family, samples: Sequence[Sample], packing: bool) -> TrialResult:
    """The engines of all parts, one rank each, in this process."""
    encoders = dict.fromkeys((VISION, *family.others), Split(dtype="float64"))
    dealer = BatchSharder(family, Collator(family, 0, packing), Division(encoders))
    data = dealer.shard(StepSamples(0, 0, ((tuple(samples),),), ()))
    graph = _graph(family)
    with _one_rank():
        ranks = {stage.name: make_rank(_settings(stage, graph, folder, packing)) for stage in graph.stages}
        *before, (_, text) = ranks.items()
        bundles = [one for name, rank in before for one in rank.forward_step(0, 0, data.work[name][0][0])]
        text.forward_step(0, 0, data.work["text"][0][0], *bundles)
        for (_, rank), gradients in zip(before, text.backward_step(0, 0, True), strict=True):
            rank.backward_step(0, 0, True, gradients)
        loss = text.take_loss()
    assert loss is not None
    wrapped = {key: count for rank in ranks.values() for key, count in wrappers_of(rank.model).items()}
    return TrialResult(
        loss, {name: g for rank in ranks.values() for name, g in _gradients(rank.model).items()}, wrapped
    )


def _gradients(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _graph(family: Family) -> StageGraph:
    stages = tuple(
        StageSpec(name, name, (range(len(family.parts[name].layers.kinds)),), Degrees(), True, range(1))
        for name in family.parts
    )
    *encoders, text = stages
    edges = (Edge(Node(s.name), Node(text.name), family.parts[s.name].tensors, True) for s in encoders)
    return StageGraph(stages, tuple(edges))


def _settings(stage: StageSpec, graph: StageGraph, folder: str, packing: bool) -> StageSettings:
    section: dict[str, Any] = {stage.part: PartConfig(model_name=folder, dtype="float64")}
    config = Config(data=DataConfig(packing=packing), **section)
    return StageSettings(config, stage, graph, "cpu", _UPDATE, ("none",) * len(stage.layers))


@contextmanager
def _one_rank() -> Iterator[Any]:
    """A process group of this process alone; it listens nowhere."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
