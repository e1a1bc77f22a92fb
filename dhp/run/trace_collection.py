"""Collects the spans of every rank in each step and writes them to the run's trace."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from dhp.base.spans import Span
from dhp.observe.metrics import StepMetrics
from dhp.observe.trace import TraceWriter

Refs = Mapping[str, list[Any]]  # by group, for each rank the ref of its spans


class Traced(Protocol):
    """A group of ranks that keep spans: both parts' actors and the dataset actor."""

    def take_spans_async(self) -> list[Any]:
        """For each rank, the ref of its spans since the last time."""

    def clock_offsets(self, timeout_s: float) -> list[int]:
        """What to add to each rank's clock, nanoseconds."""


class Tracing:
    """One run's tracing, from the moment when all ranks are there."""

    def __init__(self, groups: Mapping[str, Traced], writer: TraceWriter, timeout_s: float):
        self._groups, self._writer = groups, writer
        self._offsets = {name: group.clock_offsets(timeout_s) for name, group in groups.items()}

    def submit(self) -> Refs:
        """Ask every rank for what it will have done after all calls submitted so far."""
        return {name: group.take_spans_async() for name, group in self._groups.items()}

    def mark_step(self, metrics: StepMetrics, begun_s: float, ended_s: float) -> None:
        """Write when a step began and ended, by this process's clock."""
        self._writer.mark_step(metrics.step, begun_s, metrics.data_s or 0.0, ended_s, loss=metrics.loss)

    def write(self, spans: Mapping[str, list[list[Span]]]) -> None:
        """Write what the ranks answered: by group, the spans of each rank."""
        for name, of_ranks in spans.items():
            for rank, (found, offset) in enumerate(zip(of_ranks, self._offsets[name], strict=True)):
                self._writer.write(name, rank, found, offset)
