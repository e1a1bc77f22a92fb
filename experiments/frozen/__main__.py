"""`python -m experiments.frozen [--rounds N]`: a frozen tower, and its projector alone, beside full training.

One process and thread, the product's trainers and step; rounds of all three are interleaved. A JSON line for each:
{train, step_ratio, bound_ratio, vision_forward_s, vision_backward_s, vision_optimizer_s, optimizer_bytes,
gradient_bytes, …}; ratios to full training are medians over rounds, of CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from dhp.base.degrees import Degrees
from dhp.base.messages import StepData
from dhp.cluster.host_memory import keep_freed_memory
from dhp.models.registry import load_family
from experiments.frozen.ways import ALL, BACKWARD, FORWARD, NOTHING, OPTIMIZER, PROJECTOR, Step, Way
from experiments.pair import join_alone
from experiments.recompute.work import deal, make_model, make_samples

WIDTHS = {"tower": 256, "decoder": 384, "layers": 4}
SIDE, WORDS = 32, 128  # patches along a side of the one image, and words
STATES = 2  # averages that AdamW keeps of each weight


@dataclass(frozen=True)
class Left:
    """What must remain of the tower's backward and optimizer, as shares of full training's."""

    backward: float
    optimizer: float


def what_is_left(model: str, data: StepData, side: int, ways: Mapping[str, Way]) -> dict[str, Left]:
    """Of the projector alone: its matrices' gradients, and those of what enters all but the first; by operations. Of
    the optimizer by bytes of weights."""
    family = load_family(model)
    named = ways[PROJECTOR].vision.trainer.model.named_parameters()
    matrices = [weight.numel() for _, weight in named if weight.requires_grad and weight.dim() == 2]
    rows = data.info.vision_tokens // family.tower.merge_unit
    layout = [family.tower.image_layout((1, side, side))] * data.info.images
    backward = data.info.flops["vision"] - family.tower.work.flops(layout, backward=False)
    share = 2 * rows * (2 * sum(matrices) - matrices[0]) / backward
    weights = ways[PROJECTOR].trained_bytes() / ways[ALL].trained_bytes()
    return {ALL: Left(1.0, 1.0), PROJECTOR: Left(share, weights), NOTHING: Left(0.0, 0.0)}


def require_bytes(ways: Mapping[str, Way]) -> None:
    """Raises AssertionError where the tower keeps more gradients or states than what is trained of it needs."""
    for train, way in ways.items():
        wanted = 0 if train == NOTHING else way.trained_bytes()
        if (way.vision.gradient_bytes, way.optimizer_bytes()) != (wanted, STATES * wanted):
            raise AssertionError(
                f"train={train}: {wanted} bytes of the tower are trained, but it keeps {way.vision.gradient_bytes} of "
                f"gradients and {way.optimizer_bytes()} of states"
            )


def measure(rounds: int, widths: Mapping[str, int], side: int = SIDE) -> Iterator[dict[str, Any]]:
    """A row for each way, after one round that does not count."""
    with tempfile.TemporaryDirectory() as folder, join_alone():
        model = make_model(Path(folder), **widths)
        data = deal(model, Degrees(), Degrees(), make_samples(1, side, WORDS), 1)
        ways = {train: Way(model, train, data) for train in (ALL, PROJECTOR, NOTHING)}
        # Every other round the other way around: who comes first finds the caches of another.
        orders = [list(ways), list(ways)[::-1]]
        taken = [{train: ways[train].step() for train in orders[number % 2]} for number in range(rounds + 1)]
        if len({step.loss for step in taken[0].values()}) > 1:
            raise AssertionError(f"losses before any update differ: {taken[0]}")
        require_bytes(ways)
        left = what_is_left(model, data, side, ways)
        for train, way in ways.items():
            yield _row(train, way, taken[1:], left[train])


def _row(train: str, way: Way, taken: Sequence[Mapping[str, Step]], left: Left) -> dict[str, Any]:
    of_vision = {phase: median(r[train].vision[phase] for r in taken) for phase in (FORWARD, BACKWARD, OPTIMIZER)}
    return {
        "train": train,
        "step_ratio": round(median(r[train].seconds / r[ALL].seconds for r in taken), 3),
        "bound_ratio": round(median(bound_ratio(r[ALL], left) for r in taken), 3),
        "step_s": round(median(r[train].seconds for r in taken), 4),
        **{f"vision_{phase}_s": round(seconds, 4) for phase, seconds in of_vision.items()},
        "optimizer_bytes": way.optimizer_bytes(),
        "gradient_bytes": way.vision.gradient_bytes,
        "rounds": len(taken),
    }


def bound_ratio(full: Step, left: Left) -> float:
    """What must remain of a step of full training, as a share of it."""
    spared = (1 - left.backward) * full.vision[BACKWARD] + (1 - left.optimizer) * full.vision[OPTIMIZER]
    return (full.seconds - spared) / full.seconds


def main() -> None:
    """Print the lines."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=11)
    given = parser.parse_args()
    torch.set_num_threads(1)  # so that the process's seconds are those of the work
    keep_freed_memory()  # as dhp's ranks do
    for row in measure(given.rounds, WIDTHS):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
