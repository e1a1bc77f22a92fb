"""Evaluates forward only; sums losses and right tokens by sample."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dhp.core.batch import Answer, Bundle, PromptInput, StepInfo, TextInput
from dhp.core.reports import EvaluatedShare, SampleSums
from dhp.core.tracing import forget
from dhp.models.lora import without_adapters, without_dropout
from dhp.objectives.objective import Objective
from dhp.parallel.optim.base import StageOptimizer


@dataclass(frozen=True)
class _Kept:
    """Of one micro-batch. samples: how many it has. spans: (sample, counted tokens) in the order of the tokens. values:
    of these tokens, one each, or more behind the first. firsts: of each span, the place of its first token in its
    sample, where all values are reported."""

    samples: int
    spans: Sequence[tuple[int, int]]
    values: list[Tensor]
    firsts: Sequence[int] = ()


class SampleSumKeeper:
    """Keeps a value of each counted token of a step: its loss, or while evaluating whether it is right. objective: the
    run's. shard: this rank's number among those that share a row."""

    def __init__(self, objective: Objective, shard: int):
        self._objective, self._shard = objective, shard
        self._kept: dict[int, _Kept] = {}
        self._sent = torch.zeros(0)

    def room(self, micro_batch: int, work: TextInput) -> list[Tensor] | None:
        """Where to leave the values of a micro-batch's tokens (as `dhp.objectives.objective.Head.losses`). A forward
        that is repeated leaves them anew. None: samples have none by themselves."""
        counts, values = count_targets(work.objective or self._objective, work, self._shard), list[Tensor]()
        if counts is None:
            return None
        firsts = () if work.objective is None else [first for _, first, _ in _spans(work, self._shard)]
        self._kept[micro_batch] = _Kept(len(work.samples), counts, values, firsts)
        return values

    def send(self) -> None:
        """Begin to copy what was kept to the host. Before the step's loss is waited for, and for this with it."""
        parts = [part for one in self._kept.values() for part in one.values]
        self._sent = torch.cat(parts).to("cpu", non_blocking=True) if parts else torch.zeros(0)

    def take(self) -> SampleSums | None:
        """What was kept since the last time; None: nothing. Once it was sent and the step's loss was waited for."""
        kept, self._kept = self._kept, {}
        if not kept:
            return None
        on_host = self._sent.double()
        each = on_host.split([sum(count for _, count in one.spans) for one in kept.values()])
        sums = {m: _sums(one, values) for (m, one), values in zip(kept.items(), each, strict=True)}
        tokens = {m: _by_token(one, values) for (m, one), values in zip(kept.items(), each, strict=True) if one.firsts}
        return SampleSums(sums, {m: _targets(one) for m, one in kept.items()}, tokens)


def count_targets(objective: Objective, work: TextInput, shard: int) -> list[tuple[int, int]] | None:
    """(Sample, counted tokens) of all that a rank's rows hold, in their order; None: the objective counts none."""
    counted = objective.counted(work.tensors)
    if counted is None:
        return None
    spans = _spans(work, shard)
    parts = counted.flatten().split([size for _, _, size in spans])
    return [(sample, int(part.sum())) for (sample, _, _), part in zip(spans, parts, strict=True)]


def _spans(work: TextInput, shard: int) -> Sequence[tuple[int, int, int]]:
    """(sample, first token, tokens) of all that a rank's rows hold, in order; what fills rows up belongs to the sample
    before it, or to one behind the last."""
    if work.shards:
        return work.shards[shard]
    rows, tokens = work.tensors["input_ids"].shape
    return [(row, 0, count) for row, count in enumerate(work.lengths or (tokens,) * rows)]


def _sums(kept: _Kept, values: Tensor) -> tuple[float, ...]:
    found, values = [0.0] * kept.samples, values if values.ndim == 1 else values[:, 0]
    for (sample, count), part in zip(kept.spans, values.split([count for _, count in kept.spans]), strict=True):
        if count:
            found[sample] += float(part.sum())
    return tuple(found)


def _by_token(kept: _Kept, values: Tensor) -> tuple[tuple[int, int, Any], ...]:
    runs = zip(kept.spans, kept.firsts, values.split([count for _, count in kept.spans]), strict=True)
    return tuple((sample, first, part.numpy().copy()) for (sample, count), first, part in runs if count)


def _targets(kept: _Kept) -> tuple[int, ...]:
    found = [0] * kept.samples
    for sample, count in kept.spans:
        if count:
            found[sample] += count
    return tuple(found)


class EvaluatingEngine(ABC):
    """See `dhp.step.stages.EngineProtocol`."""

    model: PreTrainedModel
    device: torch.device
    optimizer: StageOptimizer
    by_sample: SampleSumKeeper | None = None  # where losses are computed
    _adapters_out = False

    def leave_adapters_out(self, out: bool) -> bool:
        """Whether evaluation is of the model without its adapters from here on; whether it was before."""
        before, self._adapters_out = self._adapters_out, out
        return before

    @abstractmethod
    def forward_step(self, micro_batch: int, chunk: int, work: Any, *received: Bundle) -> tuple[Bundle, ...]:
        """A chunk's forward: see `dhp.step.stages.EngineProtocol`."""

    @abstractmethod
    def forget(self, micro_batch: int, chunk: int) -> None:
        """Drop what a forward saved for its backward."""

    def evaluate_step(self, micro_batch: int, chunk: int, work: Any, *received: Bundle) -> tuple[Bundle, ...]:
        """As `forward_step`, for the loss alone: under no_grad, without dropout."""
        left_out = without_adapters(self.model) if self._adapters_out else nullcontext()
        with torch.no_grad(), without_dropout(self.model), left_out:
            sent = self.forward_step(micro_batch, chunk, work, *received)
        self.forget(micro_batch, chunk)
        return sent

    def generate(self, micro_batch: int, chunk: int, work: PromptInput, *received: Bundle) -> Answer:
        """Answer a prompt: see `dhp.step.stages.EngineProtocol`."""
        raise NotImplementedError(f"{type(self).__name__} has no decoder to answer with")

    def evaluated(self, info: StepInfo) -> EvaluatedShare:
        """This rank's share of what it evaluated since the last time."""
        if self.by_sample is not None:
            self.by_sample.send()
        loss = self.take_loss()
        self.optimizer.rest()
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()  # or others would write where kernels still read
        samples = None if self.by_sample is None else self.by_sample.take()
        return EvaluatedShare(loss or 0.0, *self.take_right(), samples)

    def end_evaluation(self, info: StepInfo, *others: Any) -> None:
        """Discard the count of sent bytes: evaluation belongs to no step."""
        forget()

    def take_loss(self) -> float | None:
        """This rank's share of the step's objective; None where the stage has no head."""
        return None

    def take_right(self) -> tuple[int, int]:
        """Counts of what this rank evaluated: targets with the highest logit, and all targets."""
        return 0, 0


def breaking(loss: Tensor) -> Tensor:
    """The loss. Where it is infinite or not a number, so are all gradients that go back from it.

    A loss may be broken though its gradients are not. The norm of all gradients, which every rank of every part knows,
    then shows it to all of them, without a message of its own and without a look at the loss, which a GPU would wait
    for. A finite loss is multiplied by 1: value and gradients keep their bits."""
    return loss * (1.0 + 0.0 * loss.detach())
