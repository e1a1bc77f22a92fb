"""A decoder on ranks that share a row: processes of one thread each, without Ray."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch.distributed as dist

from dhp.batch.reader import BatchReader
from dhp.core.axes import Degrees
from dhp.core.batch import StepData
from dhp.core.reports import StageReport
from dhp.data.sampling.dataset import StepSamples
from dhp.engine.settings import OptimizerSettings
from dhp.engine.text import TextEngine
from dhp.models.registry import load_family
from experiments.long_context.work import make_row
from experiments.pair import ONE, TEXT, pair_of, settings_of

UPDATE = OptimizerSettings(1e-4, (0.9, 0.999), 1e-8, 0.0, "constant", 0, 10**6, None)


class Decoder:
    """One rank's decoder, and the steps that it takes with the others."""

    def __init__(
        self, model: str, degrees: Degrees, recompute: str = "none", mlp_chunks: int = 1, measure: bool = False
    ):
        """measure: reports say what activations take."""
        self._model, self.degrees = model, degrees
        graph = pair_of(load_family(model), ONE, degrees)
        self._trainer = TextEngine(
            settings_of(graph, TEXT, model, UPDATE, recompute, measure=measure, mlp_chunks=mlp_chunks)
        )

    def data(self, tokens: int) -> StepData:
        """A step of one row."""
        samples = StepSamples(0, 0, (((make_row(tokens),),),), ())
        source: Any = SimpleNamespace(step=lambda _: samples)
        return BatchReader(source, load_family(self._model), 0, packing=True, text=self.degrees).step(0)

    def step(self, data: StepData) -> StageReport:
        """Forward, backward and update, as `dhp.step.step` has them."""
        shard = dist.get_rank() // self.degrees.tensor
        self._trainer.forward_step(0, 0, data.work[TEXT][0][shard])
        self._trainer.backward_step(0, 0, True)
        self._trainer.grad_norm_sq(data.info)
        return self._trainer.optimizer_step(data.info)
