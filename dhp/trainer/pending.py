"""Steps that are submitted and not finished yet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dhp.cluster.watch import Watched
from dhp.core.errors import ClusterError, PartFailed
from dhp.step.step import StepRefs
from dhp.trainer.reports import Refs as SpanRefs
from dhp.trainer.saving import Asked, Saving


@dataclass(frozen=True)
class Spans:
    """Refs of all ranks' spans up to here, in a traced run, and their calls."""

    refs: SpanRefs
    watched: list[Watched]


@dataclass(frozen=True)
class Pending:
    """A submitted step. data_ready: when its data were there; watched: all of its calls; saving: what follows it;
    asked: whether an earlier checkpoint is written; spans: in a traced run."""

    step: int
    refs: StepRefs
    data_ready: float
    watched: list[Watched]
    saving: Saving | None
    asked: Asked | None
    spans: Spans | None


@contextmanager
def naming_step(step: int) -> Iterator[None]:
    """A part that fails in here failed in this step (0-based), which its error then names."""
    try:
        yield
    except PartFailed as error:
        raise error.at_step(step + 1) from error.__cause__
    except ClusterError as error:
        raise ClusterError(f"step {step + 1}: {error}", step + 1) from error.__cause__
