"""`python -m experiments.balance_effect [--rounds N] [--steps N] [--only NAME …]`: whole steps by method of balance."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

from dhp.observe.metrics import StepMetrics
from experiments.balance_effect.made import ANNOTATIONS, make_dataset, make_model, place, texts, train


@dataclass(frozen=True)
class Run:
    """One run of a method. steps: those that count. samples: of all steps, the others included."""

    steps: Sequence[StepMetrics]
    samples: int

    @property
    def seconds(self) -> float:
        """Of all steps that count."""
        return sum(step.step_s for step in self.steps)

    @property
    def samples_per_s(self) -> float:
        """All samples over all seconds: steps that hold little do not count as much as others."""
        return sum(step.samples for step in self.steps) / self.seconds

    @property
    def tokens_per_s(self) -> float:
        """As samples; padding is no token."""
        return sum(step.tokens for step in self.steps) / self.seconds

    @property
    def pad_ratio(self) -> float:
        """Padding of all steps over all that the model was given."""
        given = sum(step.tokens / (1 - step.pad_ratio) for step in self.steps)
        return 1 - sum(step.tokens for step in self.steps) / given

    @property
    def data_share(self) -> float:
        """Share of the time that went by waiting for data."""
        return sum(step.data_s or 0.0 for step in self.steps) / self.seconds

    @property
    def dist_ratio(self) -> dict[str, float] | None:
        """Mean idle share of the steps for each part; None where the run does not tell."""
        told = [step.dist_ratio for step in self.steps if step.dist_ratio]
        return {part: mean(ratio[part] for ratio in told) for part in told[0]} if told else None


def counted(steps: Sequence[StepMetrics], warm_up: int) -> Run:
    """A run without its first steps."""
    return Run(steps[warm_up:], sum(step.samples for step in steps))


def require_same_samples(runs: Mapping[str, Run]) -> None:
    """Raises RuntimeError where one method showed fewer samples than another."""
    shown = {name: run.samples for name, run in runs.items()}
    if len(set(shown.values())) > 1:
        raise RuntimeError(f"methods showed different numbers of samples in an epoch: {shown}")


def row(method: str, runs: Sequence[Run], base: Sequence[Run]) -> dict[str, Any]:
    """Medians over the rounds. base: the runs of the same rounds that the speedup is over."""
    speedups = [run.samples_per_s / other.samples_per_s for run, other in zip(runs, base, strict=True)]
    dist = runs[0].dist_ratio
    return {
        "method": method,
        "samples_per_s": round(median(run.samples_per_s for run in runs), 3),
        "tokens_per_s": round(median(run.tokens_per_s for run in runs), 1),
        "speedup": round(median(speedups), 3),
        "speedups": [round(speedup, 3) for speedup in speedups],
        "pad_ratio": round(median(run.pad_ratio for run in runs), 4),
        "dist_ratio": dist and {part: round(median(run.dist_ratio[part] for run in runs), 4) for part in dist},
        "step_s": round(median(step.step_s for run in runs for step in run.steps), 3),
        "steps": [len(run.steps) for run in runs],
        "data_share": round(median(run.data_share for run in runs), 4),
        "samples": runs[0].samples,
    }


CONFIG = Path(__file__).with_name("config.yaml")
BASE = "random"
METHODS = {
    BASE: ["data.balance=random", "data.packing=false"],
    "random_packed": ["data.balance=random", "data.packing=true"],
    "isf": ["data.balance=isf", "data.packing=true"],
    "balanced": ["data.balance=balanced", "data.packing=true"],
}
DEFAULT = [BASE, "isf", "balanced"]
BATCH_SIZE = 8  # as in config.yaml


def compare(folder: Path, methods: Sequence[str], rounds: int, steps: int, warm_up: int) -> Iterator[dict[str, Any]]:
    """A row a method: an epoch of each in every round, the seed of the round its own."""
    data = make_dataset(folder / "data", (steps + warm_up) * BATCH_SIZE, seed=0)
    made = place(make_model(folder, texts(data)), data, ANNOTATIONS)
    runs: dict[str, list[Run]] = {method: [] for method in methods}
    for number in range(rounds):
        for method in methods:
            run_dir = folder / "run"
            told = counted(train(CONFIG, run_dir, [*made, *METHODS[method], f"seed={number}"]), warm_up)
            shutil.rmtree(run_dir)
            runs[method].append(told)
            print(f"round {number + 1}: {method}: {told.samples_per_s:.2f} samples/s", file=sys.stderr, flush=True)
        require_same_samples({method: of_rounds[-1] for method, of_rounds in runs.items()})
    for method, of_rounds in runs.items():
        yield row(method, of_rounds, runs[BASE])


def main() -> None:
    """Print a JSON line for each method."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24, help="steps of 8 random samples that count")
    parser.add_argument("--warm-up", type=int, default=2, help="first steps of each run, which do not count")
    parser.add_argument("--only", nargs="+", choices=METHODS, default=DEFAULT)
    given = parser.parse_args()
    methods = [BASE, *(method for method in given.only if method != BASE)]
    with tempfile.TemporaryDirectory() as folder:
        for found in compare(Path(folder), methods, given.rounds, given.steps, given.warm_up):
            print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
