"""Checkpoints of a run while it trains: when one is due, requested from the ranks, and given its name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dhp.checkpoint.folder import Unfinished, finish_checkpoint, open_checkpoint
from dhp.cluster.watch import Watched, wait_all
from dhp.config.parts import model_name
from dhp.config.schema import Config
from dhp.data.template import read_template
from dhp.models.registry import auxiliary_files
from dhp.run.kept_checkpoints import KeptCheckpoints
from dhp.run.session import DataPlan, Session
from dhp.step.stages import EngineProtocol


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
        if not saves_after(self._config, step, plan):
            return None
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
        checkpoint = finish_checkpoint(saving.folder, about, auxiliary_files(name), self._template)
        self._unfinished.discard(saving.folder)
        return checkpoint
