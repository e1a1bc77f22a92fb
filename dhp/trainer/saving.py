"""Checkpoints of a run while it trains: when one is due, and which are kept."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dhp.checkpoint.folder import (
    BEST,
    Best,
    Unfinished,
    checkpoints,
    finish_checkpoint,
    mark_best,
    open_checkpoint,
    read_best,
    remove_old,
    step_of,
)
from dhp.cluster.watch import Watched, wait_all
from dhp.config.parts import model_name
from dhp.config.resolve import LOSS
from dhp.config.schema import Config
from dhp.core.errors import CheckpointError
from dhp.core.fencing import require_own
from dhp.data.sample.chat import read_template
from dhp.models.pretrained import auxiliary_files
from dhp.observe.metrics import EvalMetrics
from dhp.step.stages import EngineProtocol
from dhp.trainer.session import DataPlan, Session


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
        except OSError as error:
            self._say(f"warning: {self._parent / BEST} cannot be made to lead to step_{best.step}: {_reason(error)}")
        else:
            self._say(f"the best of the checkpoints so far is {self.best}")

    def _remove(self) -> None:
        if self._limit is None:
            return
        require_own(self._parent)
        try:
            remove_old(self._parent, self._limit, self._best)
        except OSError as error:
            self._say(
                f"warning: an old checkpoint in {self._parent} cannot be removed: {_reason(error)}. "
                "The run goes on; make room yourself"
            )


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


def _value(metric: str, found: Sequence[EvalMetrics]) -> float | None:
    """The metric among an evaluation's lines, of which the last is about all datasets."""
    name = metric.removeprefix(LOSS).removeprefix("/")
    return next((one.loss for one in found if one.dataset == name), found[-1].loss)


def saves_after(config: Config, step: int, plan: DataPlan) -> bool:
    """Whether there is a checkpoint after `step` optimizer steps."""
    training = config.training
    on_the_way = training.save_steps is not None and step % training.save_steps == 0
    return on_the_way or step in plan.epoch_ends or (step == plan.steps and training.save_final)


@dataclass(frozen=True)
class Saving:
    """A submitted checkpoint: the directory that ranks write into after `step` optimizer steps, and their calls."""

    step: int
    folder: Path
    watched: list[Watched]


class Saver:
    """Checkpoints of one session. kept: which of them stay."""

    def __init__(self, session: Session, say: Callable[[str], None], unfinished: Unfinished):
        """unfinished: checkpoints that are being written, to be removed if the run fails."""
        self._session, self._config, self._say, self._unfinished = session, session.config, say, unfinished
        self._parent = Path(str(session.config.training.checkpoint_dir))
        self._template = read_template(session.config.data.chat_template)
        self.kept = KeptCheckpoints(session.config, say)

    def submit(self, step: int, plan: DataPlan) -> Saving | None:
        """Ask each rank to write what it holds after `step` optimizer steps, if a checkpoint is due then.

        The calls queue behind the step's own, so the next step may be submitted at once and still comes after them.
        """
        return self._begin(step) if saves_after(self._config, step, plan) else None

    def save(self, step: int, plan: DataPlan, skipped: int) -> Path:
        """Write a checkpoint after `step` optimizer steps, and wait for it; its path."""
        return self.finish(self._begin(step), plan, skipped)

    def _begin(self, step: int) -> Saving:
        folder = self._unfinished.add(open_checkpoint(self._parent, step))
        for stage in self._session.stages.values():
            stage.group.execute_all_async(EngineProtocol.save, str(folder / stage.spec.part), returns=0)
        return Saving(step, folder, self._session.take_watched())

    def finish(self, saving: Saving, plan: DataPlan, skipped: int) -> Path:
        """Once every rank has written, give the checkpoint its name; its path. skipped: samples so far."""
        if saving.step == plan.steps:
            self._say("saving the final checkpoint")
        wait_all(saving.watched, self._config.cluster.step_timeout_s)
        name = model_name(self._config)
        about = {
            "step": saving.step,
            "model_name": name,
            "parts": list(self._session.graph.parts()),
            "skipped_samples": skipped,
            "settings": plan.kept,
            "data": self._session.data_state(saving.step),
        }
        require_own(self._parent)  # before anything is added to a folder that may be another attempt's by now
        checkpoint = finish_checkpoint(saving.folder, about, auxiliary_files(name), self._template)
        self._unfinished.discard(saving.folder)
        return checkpoint
