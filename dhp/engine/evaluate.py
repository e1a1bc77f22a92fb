"""Evaluation on every rank: forward only; saves no activations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from transformers import PreTrainedModel

from dhp.core.batch import Bundle, StepInfo
from dhp.core.generation import Answer, PromptInput
from dhp.core.reports import EvaluatedShare
from dhp.core.tracing import forget
from dhp.engine.sample_losses import SampleLossKeeper
from dhp.models.lora import without_dropout
from dhp.parallel.optim.base import StageOptimizer


class EvaluatingEngine(ABC):
    """See `dhp.step.stages.EngineProtocol`."""

    model: PreTrainedModel
    device: torch.device
    optimizer: StageOptimizer
    by_sample: SampleLossKeeper | None = None  # where losses are computed

    @abstractmethod
    def forward_step(self, micro_batch: int, chunk: int, work: Any, *received: Bundle) -> tuple[Bundle, ...]:
        """A chunk's forward: see `dhp.step.stages.EngineProtocol`."""

    @abstractmethod
    def forget(self, micro_batch: int, chunk: int) -> None:
        """Drop what a forward saved for its backward."""

    def evaluate_step(self, micro_batch: int, chunk: int, work: Any, *received: Bundle) -> tuple[Bundle, ...]:
        """As `forward_step`, for the loss alone: under no_grad, without dropout."""
        with torch.no_grad(), without_dropout(self.model):
            sent = self.forward_step(micro_batch, chunk, work, *received)
        self.forget(micro_batch, chunk)
        return sent

    def generate(self, micro_batch: int, chunk: int, work: PromptInput, *received: Bundle) -> Answer:
        """Answer a prompt: see `dhp.step.stages.EngineProtocol`."""
        raise NotImplementedError(f"{type(self).__name__} has no decoder to answer with")

    def evaluated(self, info: StepInfo) -> EvaluatedShare:
        """This rank's share of what it evaluated since the last time."""
        loss = self.take_loss()
        self.optimizer.rest()
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # or others would write where kernels still read
        return EvaluatedShare(loss or 0.0, *self.take_right())

    def end_evaluation(self, info: StepInfo, *others: Any) -> None:
        """Discard the count of sent bytes: evaluation belongs to no step."""
        forget()

    def take_loss(self) -> float | None:
        """This rank's share of the step's objective; None where the stage has no head."""
        return None

    def take_right(self) -> tuple[int, int]:
        """Counts of what this rank evaluated: targets with the highest logit, and all targets."""
        return 0, 0
