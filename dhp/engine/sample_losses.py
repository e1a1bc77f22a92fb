"""The loss of each sample in a rank's rows: kept token by token while a step goes on, summed up when it ends.

Until then nothing waits for the device and nothing is added there: the head computes a loss a token anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dhp.core.batch import TextInput
from dhp.core.reports import SampleLosses
from dhp.objectives.objective import Objective


@dataclass(frozen=True)
class _Kept:
    """Of one micro-batch. samples: how many it has. spans: (sample, counted tokens) in the order of the tokens. losses:
    of these tokens."""

    samples: int
    spans: Sequence[tuple[int, int]]
    losses: list[Tensor]


class SampleLossKeeper:
    """Keeps the losses of one step's tokens. shard: this rank's number among those that share a row."""

    def __init__(self, objective: Objective, shard: int):
        self._objective, self._shard = objective, shard
        self._kept: dict[int, _Kept] = {}
        self._sent = torch.zeros(0)

    def room(self, micro_batch: int, work: TextInput) -> list[Tensor] | None:
        """Where to leave the losses of a micro-batch's tokens (`dhp.objectives.objective.Head.losses`). A forward that
        is repeated leaves them anew. None: nobody asks for them."""
        counted = self._objective.counted(work.tensors)
        if counted is None:
            return None
        spans, losses = _spans(work, self._shard), list[Tensor]()
        parts = counted.flatten().split([size for _, size in spans])
        counts = tuple((sample, int(part.sum())) for (sample, _), part in zip(spans, parts, strict=True))
        self._kept[micro_batch] = _Kept(len(work.samples), counts, losses)
        return losses

    def send(self) -> None:
        """Begin to copy what was kept to the host. Before the step's loss is waited for, and for this with it."""
        parts = [part for one in self._kept.values() for part in one.losses]
        self._sent = torch.cat(parts).to("cpu", non_blocking=True) if parts else torch.zeros(0)

    def take(self) -> SampleLosses | None:
        """What was kept since the last time; None: nothing. Once it was sent and the step's loss was waited for."""
        kept, self._kept = self._kept, {}
        if not kept:
            return None
        on_host = self._sent.double()
        each = on_host.split([sum(count for _, count in one.spans) for one in kept.values()])
        sums = {m: _sums(one, losses) for (m, one), losses in zip(kept.items(), each, strict=True)}
        return SampleLosses(sums, {m: _targets(one) for m, one in kept.items()})


def _spans(work: TextInput, shard: int) -> Sequence[tuple[int, int]]:
    """(sample, tokens) of all that a rank's rows hold, in order; what fills rows up belongs to the sample before it, or
    to one behind the last."""
    if work.shards:
        return [(sample, count) for sample, _, count in work.shards[shard]]
    if work.lengths is not None:
        return list(enumerate(work.lengths))
    rows, tokens = work.tensors["input_ids"].shape
    return [(row, tokens) for row in range(rows)]


def _sums(kept: _Kept, losses: Tensor) -> tuple[float, ...]:
    found = [0.0] * kept.samples
    for (sample, count), part in zip(kept.spans, losses.split([count for _, count in kept.spans]), strict=True):
        if count:
            found[sample] += float(part.sum())
    return tuple(found)


def _targets(kept: _Kept) -> tuple[int, ...]:
    found = [0] * kept.samples
    for sample, count in kept.spans:
        if count:
            found[sample] += count
    return tuple(found)
