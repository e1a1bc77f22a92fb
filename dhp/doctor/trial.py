"""One step of a tiny model, by one plain process and by the engines of all parts: losses and gradients of each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from dhp.base.degrees import Degrees
from dhp.base.geometry import IGNORED
from dhp.base.stages import Edge, Node, StageGraph, StageSpec
from dhp.batching.collate import Collator
from dhp.batching.encoders import VISION, Split
from dhp.batching.scatter import BatchSharder
from dhp.data.sample import Sample
from dhp.data.source import StepSamples
from dhp.doctor.samples import plain_inputs
from dhp.models.family import Family
from dhp.trainers.kinds import make_rank
from dhp.trainers.settings import OptimizerSettings, StageSettings

_UPDATE = OptimizerSettings(1e-3, (0.9, 0.999), 1e-8, 0.0, "constant", 0, 1, None)
_FLOOR = 1e-6  # of the norm of all gradients: what a gradient below it deviates by is rounding


@dataclass(frozen=True)
class Outcome:
    """The objective of a step, and gradients by the parameters' names."""

    loss: float
    gradients: Mapping[str, Tensor]

    def deviation(self, wanted: Outcome) -> float:
        """The largest relative deviation of the loss and of any gradient; infinite where one is no number."""
        norm = float(torch.stack([g.norm() for g in wanted.gradients.values()]).norm())
        worst = abs(self.loss - wanted.loss) / (abs(wanted.loss) or 1.0)
        for name in self.gradients.keys() | wanted.gradients.keys():
            found, expected = self.gradients.get(name), wanted.gradients.get(name)
            error = (found if expected is None else expected if found is None else found - expected).norm()
            size = max(0.0 if expected is None else float(expected.norm()), _FLOOR * norm)
            found_error = float(error) / (size or 1.0)
            worst = max(worst, math.inf if math.isnan(found_error) else found_error)  # max() would pass over it
        return math.inf if math.isnan(worst) else worst


def run_whole(model: PreTrainedModel, family: Family, samples: Sequence[Sample]) -> Outcome:
    """The plain model, each sample by itself."""
    targets = sum(sample.target_tokens for sample in samples)
    loss = 0.0
    for sample in samples:
        inputs = plain_inputs(family, type(model).forward, sample, model.dtype)
        logits = model(**inputs, use_cache=False).logits[0, :-1]
        labels = torch.from_numpy(sample.labels)[1:]
        share = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum") / targets
        share.backward()
        loss += float(share.detach())
    return Outcome(loss, _gradients(model))


def run_parts(folder: str, family: Family, samples: Sequence[Sample], packing: bool) -> Outcome:
    """The engines of all parts, one rank each, in this process."""
    encoders = dict.fromkeys((VISION, *family.others), Split(dtype="float64"))
    dealer = BatchSharder(family, Collator(family, 0, packing), encoders)
    data = dealer.shard(StepSamples(0, 0, ((tuple(samples),),), ()))
    graph = _graph(family)
    with _one_rank():
        ranks = {stage.name: make_rank(_settings(stage, graph, folder, packing)) for stage in graph.stages}
        *encoders, (_, text) = ranks.items()
        bundles = [one for name, rank in encoders for one in rank.forward_step(0, 0, data.work[name][0][0])]
        text.forward_step(0, 0, data.work["text"][0][0], *bundles)
        for (_, rank), gradients in zip(encoders, text.backward_step(0, 0, True), strict=True):
            rank.backward_step(0, 0, True, gradients)
        loss = text.take_loss()
    assert loss is not None
    return Outcome(loss, {name: g for rank in ranks.values() for name, g in _gradients(rank.model).items()})


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
    return StageSettings(
        spec=stage,
        graph=graph,
        model_name=folder,
        dtype="float64",
        device="cpu",
        recompute=("none",) * len(stage.layers),
        measure=False,
        zero_stage=0,
        zero_engine="deepspeed",
        autotp=False,
        packing=packing,
        update=_UPDATE,
        seed=0,
    )


@contextmanager
def _one_rank() -> Iterator[Any]:
    """A process group of this process alone; it listens nowhere."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
