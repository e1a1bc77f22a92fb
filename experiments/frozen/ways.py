"""A pair of stages in this process, of which the tower is trained as a whole, in part or not at all: steps, timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from dhp.base.messages import StepData
from dhp.cluster.dispatch import PerRank
from dhp.config.schema import TrainingConfig
from dhp.models.registry import load_family
from dhp.parallel.optimizer.frozen import Frozen
from dhp.run.training import training_rules
from dhp.step.schedule import make_schedule
from dhp.step.stages import make_stages
from dhp.step.step import train_step
from dhp.trainers.settings import OptimizerSettings
from dhp.trainers.text import TextTrainer
from dhp.trainers.vision import VisionTrainer
from experiments.pair import TEXT, VISION, Here, as_batch, pair_of, settings_of

UPDATE = OptimizerSettings(1e-4, (0.9, 0.999), 1e-8, 0.01, "constant", 0, 10**6, 1.0)
FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
ALL, PROJECTOR, NOTHING = "all", "projector", "nothing"  # what of the tower is trained
_FROZEN = {ALL: [], PROJECTOR: ["vision"], NOTHING: ["vision", "projector"]}  # training.frozen for that
_PHASES = {
    "forward_step": FORWARD,
    "backward_step": BACKWARD,
    "grad_norm_sq": OPTIMIZER,
    "optimizer_step": OPTIMIZER,
}


@dataclass(frozen=True)
class Step:
    """Seconds of the process's CPU: of the whole, and of the tower's phases. loss: of the batch before the update."""

    seconds: float
    vision: dict[str, float]
    loss: float


class Timed(Here):
    """A stage whose calls are timed. gradient_bytes: of the step, at its end."""

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self.spent = dict.fromkeys((FORWARD, BACKWARD, OPTIMIZER), 0.0)
        self.trainer, self.gradient_bytes = trainer, 0

    def execute_all_async(
        self, method: str | Callable[..., Any], *arguments: Any, returns: int | PerRank = 1
    ) -> list[list[Any]]:
        """As `dhp.step.stages.Group`."""
        name = method if isinstance(method, str) else method.__name__
        if name == "optimizer_step":
            self.gradient_bytes = self.trainer.optimizer.gradient_bytes()
        begin = time.process_time()
        answer = super().execute_all_async(name, *arguments, returns=returns)
        self.spent[_PHASES[name]] += time.process_time() - begin
        return answer


class Way:
    """Both stages with the tower trained as `train` says."""

    def __init__(self, model: str, train: str, data: StepData):
        family = load_family(model)
        rules = training_rules(TrainingConfig(frozen=_FROZEN[train]), family)
        chain = pair_of(family, vision_trains=train != NOTHING)
        self.vision = Timed(VisionTrainer(settings_of(chain, VISION, model, UPDATE, rules=rules)))
        text = Timed(TextTrainer(settings_of(chain, TEXT, model, UPDATE)))
        self._stages = make_stages(chain, {VISION: self.vision, TEXT: text})
        self._schedule, self._batch = make_schedule("sequential", chain, 1), as_batch(data)

    def step(self) -> Step:
        """One whole step."""
        before, begin = dict(self.vision.spent), time.process_time()
        (report,) = train_step(self._stages, self._schedule, (), self._batch).reports[TEXT]
        seconds = time.process_time() - begin
        return Step(seconds, {phase: s - before[phase] for phase, s in self.vision.spent.items()}, report.loss)

    def optimizer_bytes(self) -> int:
        """What the tower's optimizer keeps between steps, beyond the weights."""
        if isinstance(self.vision.trainer.optimizer, Frozen):
            return 0
        states = self.vision.trainer.optimizer.optimizer.state.values()
        return sum(value.nbytes for state in states for value in state.values() if value.dim())

    def trained_bytes(self) -> int:
        """Of the tower's weights that are trained."""
        return sum(weight.nbytes for weight in self.vision.trainer.model.parameters() if weight.requires_grad)
