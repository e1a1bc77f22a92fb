"""Which checkpoints of a run stay, and which of them is best."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from dhp.checkpoint.folder import BEST, Best, checkpoints, mark_best, read_best, remove_old, step_of
from dhp.config.resolve import LOSS
from dhp.config.schema import Config
from dhp.core.errors import CheckpointError
from dhp.core.fencing import TakenOver, require_own
from dhp.observe.metrics import EvalMetrics


class KeptCheckpoints:
    """Takes each complete checkpoint and each evaluation, in the order in which they come."""

    def __init__(self, config: Config, say: Callable[[str], None]):
        self._parent, self._limit = Path(str(config.training.checkpoint_dir)), config.training.save_total_limit
        self._metric, self._say = config.training.best_metric, say
        self._best = None if self._metric is None else self._read(self._metric)

    @property
    def best(self) -> str | None:
        """The best checkpoint so far, and its metric, in words; None where none is known."""
        best = self._best
        return None if best is None else f"step_{best.step}: {best.metric} {best.value:.4f}"

    def finished(self, step: int) -> None:
        """The checkpoint of `step` is complete. With a best one to be found, old ones go after its evaluation: the one
        that would go may be the best."""
        if self._metric is None:
            self._remove()

    def evaluated(self, found: Sequence[EvalMetrics]) -> None:
        """The losses after a step, if any. Where it has a checkpoint and is better than the best, it is that now."""
        if self._metric is None or not found:
            return
        step, value = found[0].step, _value(self._metric, found)
        if value is not None and math.isfinite(value) and step in map(step_of, checkpoints(self._parent)):
            if self._best is None or value < self._best.value:
                self._best = Best(step, self._metric, value)
                self._mark(self._best)
            self._remove()

    def _read(self, metric: str) -> Best | None:
        try:
            return read_best(self._parent, metric)
        except CheckpointError as error:  # no reason to end a run: the checkpoints themselves are whole
            self._say(f"warning: {error}; until then the best of the evaluations to come is the best")
            return None

    def _mark(self, best: Best) -> None:
        try:
            mark_best(self._parent, best)
        except (OSError, CheckpointError) as error:
            self._say(f"warning: {self._parent / BEST} cannot be made to lead to step_{best.step}: {_reason(error)}")
        else:
            self._say(f"the best of the checkpoints so far is {self.best}")

    def _remove(self) -> None:
        if self._limit is None:
            return
        try:
            require_own(self._parent)
            remove_old(self._parent, self._limit, self._best)
        except TakenOver:
            raise
        except (OSError, CheckpointError) as error:
            self._say(
                f"warning: an old checkpoint in {self._parent} cannot be removed: {_reason(error)}. "
                "The run goes on; make room yourself"
            )


def _reason(error: OSError | CheckpointError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _value(metric: str, found: Sequence[EvalMetrics]) -> float | None:
    """The metric among an evaluation's lines, of which the last is about all datasets."""
    name = metric.removeprefix(LOSS).removeprefix("/")
    return next((one.loss for one in found if one.dataset == name), found[-1].loss)
