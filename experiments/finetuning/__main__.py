"""`python -m experiments.finetuning [--rounds N] [--only QUESTION …]`: steps that train some of a model, side by side.

One process and thread, the product's trainers and step; rounds of all that is compared are interleaved, and ratios are
medians over rounds, of CPU seconds. A JSON line for each way to train, with the `question` that it belongs to:

frozen: a tower that stays as it is, and its projector alone, beside full training.
lora, lora_even: adapters beside full training, and beside peft in a plain loop; of samples of mixed lengths, or of one.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

from dhp.batch.collate import Collator
from dhp.batch.shard import BatchSharder, Division
from dhp.cluster.host import keep_freed_memory
from dhp.config.training import TrainingConfig
from dhp.core.axes import Degrees
from dhp.core.batch import StepData
from dhp.core.dispatch import PerRank
from dhp.core.parameters import AdapterSettings
from dhp.data.sampling.dataset import StepSamples
from dhp.engine.encoder_engine import EncoderEngine
from dhp.engine.stage_settings import OptimizerSettings
from dhp.engine.text_engine import TextEngine
from dhp.models.empty import list_parameters
from dhp.models.family import Family
from dhp.models.flops import NO_BACKWARD
from dhp.models.lora import find_targets
from dhp.models.registry import load_family
from dhp.models.shape import find_passes
from dhp.parallel.optim.base import Frozen
from dhp.plan.trainable import trained_stage, training_rules
from dhp.step.schedule import make_schedule
from dhp.step.stages import make_stages
from dhp.step.step import train_step
from experiments.loops import MICRO_BATCHES, Data, MicroBatches, Plain, save_model
from experiments.pair import TEXT, VISION, Here, as_batch, join_alone, pair_of, settings_of
from experiments.small import deal, make_samples, save_even_model

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
        """As `dhp.step.stages.RankGroup`."""
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
        graph = pair_of(
            family, vision_trains=trained_stage(rules, lambda: list_parameters(model, family, adapters))(VISION, ())
        )
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


WIDTHS = {"tower": 256, "decoder": 384, "layers": 4}
SIDE, WORDS = 32, 128  # patches along a side of the one image, and words
ALL, PROJECTOR, NOTHING = "all", "projector", "nothing"  # what of the tower is trained
TRAINED = {ALL: Trained(), PROJECTOR: Trained(("vision",)), NOTHING: Trained(("vision", "projector"))}


@dataclass(frozen=True)
class Left:
    """What must remain of the tower's backward and optimizer, as shares of full training's."""

    backward: float
    optimizer: float


def what_is_left(model: str, data: StepData, side: int, ways: Mapping[str, Way]) -> dict[str, Left]:
    """Of the projector alone: of backward by operations, of the optimizer by bytes of weights."""
    family = load_family(model)
    rules = training_rules(TrainingConfig(frozen=list(TRAINED[PROJECTOR].frozen)), family)
    passes = find_passes(family, list_parameters(model, family), rules)[VISION]
    layouts = [family.tower.image_layout((1, side, side))] * data.info.images
    ahead, projected = (family.tower.work.flops(layouts, one) for one in (NO_BACKWARD, passes))
    weights = ways[PROJECTOR].vision.trained_bytes() / ways[ALL].vision.trained_bytes()
    left = Left((projected - ahead) / (data.info.flops[VISION] - ahead), weights)
    return {ALL: Left(1.0, 1.0), PROJECTOR: left, NOTHING: Left(0.0, 0.0)}


def measure(rounds: int, widths: Mapping[str, int] = WIDTHS, side: int = SIDE) -> Iterator[dict[str, Any]]:
    """A row for each way, after one round that does not count. Raises AssertionError where first losses differ, or
    where the tower keeps bytes for what is not trained."""
    with tempfile.TemporaryDirectory() as folder, join_alone():
        model = save_even_model(Path(folder), **widths)
        data = deal(model, Degrees(), Degrees(), make_samples(1, side, WORDS), 1)
        ways = {train: Way(model, trained, 1) for train, trained in TRAINED.items()}
        # Every other round the other way around: who comes first finds the caches of another.
        orders = [list(ways), list(ways)[::-1]]
        taken = [{train: ways[train].step(data) for train in orders[number % 2]} for number in range(rounds + 1)]
        if len({step.loss for step in taken[0].values()}) > 1:
            raise AssertionError(f"losses before any update differ: {taken[0]}")
        for train, way in ways.items():
            require_bytes(f"train={train}", {VISION: way.vision})
        left = what_is_left(model, data, side, ways)
        for train, way in ways.items():
            yield _row(train, way, taken[1:], left[train])


def _row(train: str, way: Way, taken: Sequence[Mapping[str, Step]], left: Left) -> dict[str, Any]:
    of_vision = {phase: median(r[train].vision[phase] for r in taken) for phase in (FORWARD, BACKWARD, OPTIMIZER)}
    return {
        "train": train, "speed_ratio": round(median(r[ALL].seconds / r[train].seconds for r in taken), 3),
        "bound_ratio": round(median(1 / share_left(r[ALL], left) for r in taken), 3),
        "step_s": round(median(r[train].seconds for r in taken), 4),
        **{f"vision_{phase}_s": round(seconds, 4) for phase, seconds in of_vision.items()},
        "optimizer_bytes": way.vision.optimizer_bytes(), "gradient_bytes": way.vision.gradient_bytes,
        "rounds": len(taken),
    }  # fmt: skip


def share_left(full: Step, left: Left) -> float:
    """What must remain of a step of full training, as a share of it."""
    spared = (1 - left.backward) * full.vision[BACKWARD] + (1 - left.optimizer) * full.vision[OPTIMIZER]
    return (full.seconds - spared) / full.seconds


MODEL = "qwen2_5_vl"  # of `experiments.loops`
ADAPTERS = AdapterSettings(rank=8, alpha=16.0)
CLOSE = 1e-4  # relative: losses of the first step, before any update
FULL, OF_TEXT, OF_BOTH = "all", "lora_text", "lora_both"
ADAPTED = {
    FULL: Trained(),
    OF_TEXT: Trained(("vision", "projector"), {TEXT: ADAPTERS}),
    OF_BOTH: Trained((), {VISION: ADAPTERS, TEXT: ADAPTERS}),
}


class Ours:
    """A way through dhp's trainers: what is dealt out, and seconds and loss of a step."""

    def __init__(self, model: str, trained: Trained, data: Data):
        self.way = Way(model, trained, MICRO_BATCHES)
        self._dealer = BatchSharder(data.family, Collator(data.family, 0, packing=True), Division())

    def shard(self, samples: MicroBatches) -> Any:
        """What other processes do ahead of a step."""
        return self._dealer.shard(StepSamples(0, 0, tuple((row,) for row in samples), ()))

    def step(self, data: Any) -> tuple[float, float]:
        """Seconds and loss of a whole step."""
        taken = self.way.step(data)
        return taken.seconds, taken.loss


def add_peft(model: nn.Module, family: Family, trained: Trained) -> nn.Module:
    """The plain model as peft's users get it: its own call, beside the matrices that ours has adapters beside."""
    from peft import LoraConfig, get_peft_model

    targets = [name for part, asked in trained.adapters.items() for name in _targets(model, family, part, asked)]
    if not targets:
        return model
    return get_peft_model(model, LoraConfig(r=ADAPTERS.rank, lora_alpha=int(ADAPTERS.alpha), target_modules=targets))


def _targets(model: nn.Module, family: Family, part: str, asked: AdapterSettings) -> tuple[str, ...]:
    return find_targets(model, family.parts[part], asked)


def measure_lora(rounds: int, even: bool = False) -> Iterator[dict[str, Any]]:
    """A row for each way, after one round that does not count. even: samples of one length. Raises AssertionError where
    first losses differ, or where bytes are kept for what is not trained."""
    with tempfile.TemporaryDirectory() as folder, join_alone():
        model = save_model(MODEL, Path(folder))
        data = Data(model, even)
        ours = {train: Ours(model, trained, data) for train, trained in ADAPTED.items()}
        plain = {
            train: Plain(model, data, partial(add_peft, family=data.family, trained=trained))
            for train, trained in ADAPTED.items()
        }
        taken = [_round(number, data.step(number), ours, plain) for number in range(rounds + 1)]
        for train, one in ours.items():
            require_bytes(train, one.way.stages)
        for train in ADAPTED:
            yield _lora_row(train, ours[train].way, plain[train], taken[1:])


def _round(number: int, samples: MicroBatches, *sides: Mapping[str, Ours | Plain]) -> list[dict[str, float]]:
    """Seconds by way, of each side; first losses are compared."""
    order = [(side, train) for train in ADAPTED for side in range(len(sides))]
    seconds: list[dict[str, float]] = [{} for _ in sides]
    losses = []
    # Every other round the other way around: who comes first finds the caches of another.
    for side, train in order if number % 2 else order[::-1]:
        way: Any = sides[side][train]
        seconds[side][train], loss = way.step(way.shard(samples))
        losses.append(loss)
    if number == 0 and max(losses) / min(losses) - 1 > CLOSE:
        raise AssertionError(f"losses before any update differ: {losses}")
    return seconds


def _lora_row(train: str, way: Way, plain: Plain, taken: Sequence[Sequence[Mapping[str, float]]]) -> dict[str, Any]:
    """Seconds of rounds by side: ours, the plain loop's."""
    stages = way.stages.values()
    of_plain = sum(weight.nbytes for weight in plain.model.parameters() if weight.requires_grad)
    return {
        "train": train, "speed_ratio": round(median(ours[FULL] / ours[train] for ours, _ in taken), 3),
        "to_plain": round(median(ours[train] / theirs[train] for ours, theirs in taken), 3),
        "step_s": round(median(ours[train] for ours, _ in taken), 4),
        "plain_step_s": round(median(theirs[train] for _, theirs in taken), 4),
        "gradient_bytes": sum(stage.gradient_bytes for stage in stages),
        "optimizer_bytes": sum(stage.optimizer_bytes() for stage in stages), "plain_optimizer_bytes": STATES * of_plain,
        "rounds": len(taken),
    }  # fmt: skip


# What is asked: from a number of rounds to its lines. A further comparison is a module and a line here.
QUESTIONS: dict[str, Callable[[int], Iterator[dict[str, Any]]]] = {
    "frozen": measure,
    "lora": measure_lora,
    "lora_even": partial(measure_lora, even=True),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--only", nargs="+", choices=list(QUESTIONS), default=list(QUESTIONS), metavar="QUESTION")
    given = parser.parse_args()
    logging.disable_progress_bar()
    torch.set_num_threads(1)  # so that the process's seconds are those of the work
    keep_freed_memory()  # as dhp's ranks do
    for question in given.only:
        for row in QUESTIONS[question](given.rounds):
            print(json.dumps({"question": question} | row), flush=True)


if __name__ == "__main__":
    main()
