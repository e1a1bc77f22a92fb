"""A pair of stages in this process, of which some is trained: steps, timed, and what is kept for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

from dhp.config.training import TrainingConfig
from dhp.core.batch import StepData
from dhp.core.dispatch import PerRank
from dhp.core.parameters import AdapterSettings
from dhp.engine.encoder import EncoderEngine
from dhp.engine.settings import OptimizerSettings
from dhp.engine.text import TextEngine
from dhp.models.registry import load_family
from dhp.parallel.optim.frozen import Frozen
from dhp.step.schedule import make_schedule
from dhp.step.stages import make_stages
from dhp.step.step import train_step
from dhp.trainer.model_shapes import ModelShapes
from dhp.trainer.trainable import trained_stage, training_rules
from experiments.pair import TEXT, VISION, Here, as_batch, pair_of, settings_of

UPDATE = OptimizerSettings(1e-4, (0.9, 0.999), 1e-8, 0.01, "constant", 0, 10**6, 1.0)
STATES = 2  # averages that AdamW keeps of each weight
FORWARD, BACKWARD, OPTIMIZER = PHASES = "forward", "backward", "optimizer"
_PHASES = {"forward_step": FORWARD, "backward_step": BACKWARD, "grad_norm_sq": OPTIMIZER, "optimizer_step": OPTIMIZER}


@dataclass(frozen=True)
class Trained:
    """What of the model is trained. frozen: as training.frozen; adapters: by part."""

    frozen: tuple[str, ...] = ()
    adapters: Mapping[str, AdapterSettings] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class Step:
    """Seconds of the process's CPU: of the whole, and of the phases of both stages. loss: of the batch before the
    update."""

    seconds: float
    vision: dict[str, float]
    loss: float
    text: dict[str, float] = field(default_factory=dict)


class Timed(Here):
    """A stage whose calls are timed. gradient_bytes: of the step, at its end."""

    def __init__(self, trainer: Any):
        super().__init__(trainer)
        self.spent = dict.fromkeys(PHASES, 0.0)
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

    def optimizer_bytes(self) -> int:
        """What the optimizer keeps between steps, beyond the weights."""
        if isinstance(self.trainer.optimizer, Frozen):
            return 0
        states = self.trainer.optimizer.optimizer.state.values()
        return sum(value.nbytes for state in states for value in state.values() if value.dim())

    def trained_bytes(self) -> int:
        """Of the weights that are trained."""
        return sum(weight.nbytes for weight in self.trainer.model.parameters() if weight.requires_grad)


class Way:
    """Both stages, trained as `trained` says, in steps of so many micro-batches."""

    def __init__(self, model: str, trained: Trained, micro_batches: int):
        family, adapters = load_family(model), trained.adapters
        rules = training_rules(TrainingConfig(frozen=list(trained.frozen)), family, adapters)
        graph = pair_of(family, vision_trains=trained_stage(rules, ModelShapes(family, model, adapters))(VISION, ()))
        trainers = {VISION: EncoderEngine, TEXT: TextEngine}
        given = partial(settings_of, graph, model=model, update=UPDATE, rules=rules)
        self.stages = {
            stage: Timed(kind(given(stage, adapters=adapters.get(stage)))) for stage, kind in trainers.items()
        }
        self._stages = make_stages(graph, self.stages)
        self._schedule = make_schedule("sequential", graph, micro_batches)

    @property
    def vision(self) -> Timed:
        """The tower's stage."""
        return self.stages[VISION]

    def step(self, data: StepData) -> Step:
        """One whole step."""
        before = {name: dict(stage.spent) for name, stage in self.stages.items()}
        begin = time.process_time()
        (report,) = train_step(self._stages, self._schedule, (), as_batch(data)).reports[TEXT]
        seconds = time.process_time() - begin
        spent = {
            name: {phase: s - before[name][phase] for phase, s in stage.spent.items()}
            for name, stage in self.stages.items()
        }
        return Step(seconds, spent[VISION], report.loss, spent[TEXT])


def require_bytes(train: str, stages: Mapping[str, Timed]) -> None:
    """Raises AssertionError where a stage keeps more gradients or states than what is trained of it needs, or less."""
    for name, stage in stages.items():
        frozen = isinstance(stage.trainer.optimizer, Frozen)
        wanted = 0 if frozen else stage.trained_bytes()
        if (stage.gradient_bytes, stage.optimizer_bytes()) != (wanted, STATES * wanted):
            raise AssertionError(
                f"{train}: {wanted} bytes of {name} are trained, but it keeps {stage.gradient_bytes} of gradients and "
                f"{stage.optimizer_bytes()} of states"
            )
