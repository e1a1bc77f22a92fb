"""`python -m experiments.balance_effect [--rounds N] [--steps N] [--only NAME …]`: whole steps by method of balance."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.balance_effect.dataset import ANNOTATIONS, make_dataset, texts
from experiments.balance_effect.entry import place, train
from experiments.balance_effect.measured import Run, counted, require_same_samples, row
from experiments.balance_effect.model import make_model

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
