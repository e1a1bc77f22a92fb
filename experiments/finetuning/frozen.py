"""A tower that stays as it is, and its projector alone, beside full training, where the tower is half of the cost."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from dhp.config.training import TrainingConfig
from dhp.core.axes import Degrees
from dhp.core.batch import StepData
from dhp.models.empty import list_parameters
from dhp.models.flops import NO_BACKWARD
from dhp.models.registry import load_family
from dhp.models.trained_flops import find_passes
from dhp.trainer.trainable import training_rules
from experiments.finetuning.ways import BACKWARD, FORWARD, OPTIMIZER, Step, Trained, Way, require_bytes
from experiments.pair import VISION, join_alone
from experiments.small import deal, make_samples, save_even_model

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
        "train": train,
        "speed_ratio": round(median(r[ALL].seconds / r[train].seconds for r in taken), 3),
        "bound_ratio": round(median(1 / share_left(r[ALL], left) for r in taken), 3),
        "step_s": round(median(r[train].seconds for r in taken), 4),
        **{f"vision_{phase}_s": round(seconds, 4) for phase, seconds in of_vision.items()},
        "optimizer_bytes": way.vision.optimizer_bytes(),
        "gradient_bytes": way.vision.gradient_bytes,
        "rounds": len(taken),
    }


def share_left(full: Step, left: Left) -> float:
    """What must remain of a step of full training, as a share of it."""
    spared = (1 - left.backward) * full.vision[BACKWARD] + (1 - left.optimizer) * full.vision[OPTIMIZER]
    return (full.seconds - spared) / full.seconds
