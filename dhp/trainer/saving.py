"""Saves checkpoints beside steps, and keeps some."""

import math
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dhp.checkpoint.folder import (
    BEST,
    EARLY_STOPPING,
    Best,
    Unfinished,
    checkpoints,
    finish_checkpoint,
    mark_best,
    open_checkpoint,
    read_best,
    read_model_files,
    remove_old,
    step_of,
)
from dhp.cluster.hangs.watch import Watched, wait_all
from dhp.config.parts import model_name
from dhp.config.schema import Config
from dhp.core.errors import CheckpointError, DhpError, PartFailed
from dhp.core.locks import TakenOver, require_fence
from dhp.core.reports import SavedShare, WrittenFile
from dhp.data.sample.chat import read_template
from dhp.models.base_files import KEYS, describe_tensors, find_directory
from dhp.models.pretrained import auxiliary_files
from dhp.observe.metrics import EvalMetrics
from dhp.observe.ranks import SAVE
from dhp.step.stages import EngineProtocol
from dhp.trainer.early_stopping import metric_value
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
        step, value = found[0].step, metric_value(self._metric, found)
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
            require_fence(self._parent)
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


MINUTE_S = 60.0


def saves_after(config: Config, step: int, plan: DataPlan) -> bool:
    """Whether there is a checkpoint after `step` optimizer steps, by the number of steps."""
    training = config.training
    on_the_way = training.save_steps is not None and step % training.save_steps == 0
    return on_the_way or step in plan.epoch_ends or (step == plan.steps and training.save_final)


@dataclass(frozen=True)
class Saving:
    """A checkpoint that is being written.

    begun: when, by `time.monotonic`. watched: the calls in which ranks copy what they hold."""

    step: int
    folder: Path
    begun: float
    watched: tuple[Watched, ...]


@dataclass(frozen=True)
class SaveQuery:
    """A question to all ranks, by stage, whether they have written their shares; refs of `SavedShare`."""

    saving: Saving
    refs: Mapping[str, Sequence[Sequence[Any]]]


class Saver:
    """Checkpoints of one session, one at a time. kept: which of them stay."""

    def __init__(
        self,
        session: Session,
        say: Callable[[str], None],
        unfinished: Unfinished,
        note: Callable[[str, int, float, str], None] = lambda event, step, seconds, text: None,
    ):
        """unfinished: checkpoints that are being written, to be removed if the run fails. note: records the event of a
        checkpoint, with the seconds in which training waited."""
        self._session, self._config, self._say, self._unfinished = session, session.config, say, unfinished
        self._parent = Path(str(session.config.training.checkpoint_dir))
        template = read_template(session.config.data.chat_template)
        # Read once: the model's folder may be gone, or another, when a checkpoint is written.
        self._model_files = read_model_files(auxiliary_files(model_name(self._config)), template)
        if keys := describe_tensors(find_directory(model_name(self._config))):
            self._model_files = {**self._model_files, KEYS: keys.encode()}
        self._running: Saving | None = None
        self._about: dict[str, Any] = {}
        self._stall_s, self._failed, self._note = 0.0, "", note
        self._last = time.monotonic()
        self.kept = KeptCheckpoints(session.config, say)
        self.newest: Path | None = None  # complete, of this session
        self.early_stopping: Mapping[str, Any] = {}  # its state, which checkpoints keep

    @property
    def busy(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._running is not None

    def has(self, step: int) -> bool:
        """Whether there is a complete checkpoint after `step` steps, of this session."""
        return self.newest is not None and self.newest.name == f"step_{step}"

    def is_due(self, step: int, plan: DataPlan) -> bool:
        """Whether there is to be a checkpoint after `step` optimizer steps, by their number or by the clock."""
        return saves_after(self._config, step, plan) or self._is_time()

    def begin(self, step: int) -> Saving | None:
        """Let each rank copy what it holds after `step` optimizer steps, and begin to write it. None: it cannot be
        written, which is said.

        The calls queue behind the step's own, so the next step may be submitted at once and still comes after them."""
        return self._begin(step, self._config.training.save_in_background)

    def require(self, step: int) -> None:
        """Raise CheckpointError where the checkpoint of the last step could not be written."""
        if self._failed and not self.has(step):
            raise CheckpointError(f"training is done, and there is no checkpoint after step {step}: {self._failed}")

    def ask(self) -> SaveQuery | None:
        """Ask all ranks whether they have written; None where nothing is being written. The question queues behind what
        was submitted before."""
        if self._running is None:
            return None
        return SaveQuery(self._running, self._question(self._running, wait=False))

    def staged(self, saving: Saving, plan: DataPlan, skipped: int) -> None:
        """Wait until each rank has its copies. skipped: samples so far, with those of the step that was saved. Raises
        as `wait_all` does."""
        begun = time.monotonic()
        self._about = {  # asked for while ranks copy: behind them the next step runs already
            "step": saving.step,
            "model_name": model_name(self._config),
            "parts": list(self._session.graph.parts()),
            "skipped_samples": skipped,
            "settings": plan.kept,
            "data": self._session.data_state(saving.step),
            EARLY_STOPPING: dict(self.early_stopping),
        }
        wait_all(saving.watched, self._config.training.save_timeout_s)
        self._stall_s = time.monotonic() - begun

    def look(self, asked: SaveQuery | None) -> None:
        """Take the answers to a question whose calls have worked; where all ranks are done, complete the checkpoint.
        Raises PartFailed where one takes longer than training.save_timeout_s."""
        if asked is None or asked.saving is not self._running:
            return
        shares = self._answers(asked)
        waiting = [f"{part} rank {n}" for part, of in shares.items() for n, one in enumerate(of) if not one.done]
        if not waiting:
            self._complete(asked.saving, shares)
        elif time.monotonic() - asked.saving.begun > self._config.training.save_timeout_s:
            raise PartFailed(
                f"{', '.join(waiting)} did not finish writing {asked.saving.folder} in training.save_timeout_s="
                f"{self._config.training.save_timeout_s:g} s: is its disk away? Newer steps are lost; "
                "training.resume=auto goes on from the checkpoint before"
            )

    def finish(self) -> float:
        """Wait for the checkpoint that is being written, if there is one; seconds."""
        if self._running is None:
            return 0.0
        begun = time.monotonic()
        asked = SaveQuery(self._running, self._question(self._running, wait=True))
        wait_all(self._session.take_watched(), self._config.training.save_timeout_s)
        waited = time.monotonic() - begun
        self._stall_s += waited
        self._complete(self._running, self._answers(asked))
        return waited

    def save(self, step: int, plan: DataPlan, skipped: int) -> Path:
        """Write a checkpoint after `step` optimizer steps, and wait for it; its path. Raises CheckpointError where it
        cannot be written."""
        self.finish()
        self._failed = ""
        saving = self._begin(step, background=False)
        if saving is not None:
            self.staged(saving, plan, skipped)
            self.finish()
        if self.newest is None or self._failed:
            raise CheckpointError(f"there is no checkpoint after step {step}: {self._failed}")
        return self.newest

    def rescue(self) -> None:
        """Finish the checkpoint that is being written, if all of it is copied: the run ends for a reason of its own,
        and its ranks are well."""
        if self._running is not None and self._about.get("step") == self._running.step:
            self.finish()

    def _is_time(self) -> bool:
        minutes = self._config.training.save_minutes
        return minutes is not None and time.monotonic() - self._last >= minutes * MINUTE_S

    def _begin(self, step: int, background: bool) -> Saving | None:
        self._last = time.monotonic()
        try:
            require_fence(self._parent)
            folder = self._unfinished.add(open_checkpoint(self._parent, step))
        except TakenOver:
            raise
        except (CheckpointError, OSError, ValueError) as error:
            self._fail(step, str(error))
            return None
        for stage in self._session.stages.values():
            stage.group.execute_all_async(EngineProtocol.save, str(folder / stage.spec.part), background, returns=0)
        self._running = Saving(step, folder, self._last, tuple(self._session.take_watched()))
        return self._running

    def _question(self, saving: Saving, wait: bool) -> Mapping[str, Sequence[Sequence[Any]]]:
        stages = self._session.stages
        return {name: one.group.execute_all_async(EngineProtocol.saved, wait) for name, one in stages.items()}

    def _answers(self, asked: SaveQuery) -> dict[str, list[SavedShare]]:
        values = self._session.values
        return {name: values([ref for of_rank in of for ref in of_rank]) for name, of in asked.refs.items()}

    def _complete(self, saving: Saving, shares: Mapping[str, Sequence[SavedShare]]) -> None:
        """Make a checkpoint of what all ranks have written; or remove it, and say why, where one could not write."""
        self._running = None
        errors = dict.fromkeys(one.error for of in shares.values() for one in of if one.error is not None)
        try:
            if errors:
                first, *more = errors
                raise CheckpointError(first + (f". {len(more)} more ranks could not write either" if more else ""))
            require_fence(self._parent)  # before anything is added to a folder that may be another attempt's by now
            files = (file for name, of in shares.items() for file in self._named(name, of))
            self.newest = finish_checkpoint(saving.folder, self._about, self._model_files, files)
        except TakenOver:
            raise
        except (DhpError, OSError, ValueError) as error:
            shutil.rmtree(saving.folder, ignore_errors=True)
            self._fail(saving.step, str(error))
        else:
            took = time.monotonic() - saving.begun
            text = f"step_{saving.step} is saved: {took:.1f} s, of which training waited {self._stall_s:.2f} s"
            self._say(text)
            self._note(SAVE, saving.step, self._stall_s, text)
            self.kept.finished(saving.step)
        self._unfinished.discard(saving.folder)

    def _named(self, stage: str, shares: Sequence[SavedShare]) -> list[WrittenFile]:
        part = self._session.stages[stage].spec.part
        return [replace(file, name=f"{part}/{file.name}") for one in shares for file in one.files]

    def _fail(self, step: int, reason: str) -> None:
        """A checkpoint that cannot be written ends no run: the ones before stay, and the next one may be possible."""
        self._failed = reason
        self._say(f"warning: there is no checkpoint after step {step}: {reason}. The run goes on")
