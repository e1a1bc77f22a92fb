"""`python -m experiments.host_memory [--rounds N] [--steps N]`: keeping freed memory, what it saves and costs."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median

import torch.multiprocessing as multiprocessing

from experiments.host_memory.work import measure
from experiments.layouts.work import make_model


def main() -> None:
    """Print a JSON line for each way and a last one with the ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    found: dict[bool, list[dict[str, float]]] = {True: [], False: []}
    answers = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_model(Path(folder), "balanced"))
        for _ in range(given.rounds):
            for keep, runs in found.items():
                multiprocessing.spawn(measure, (model, keep, given.steps, answers))
                runs.append(answers.get())
    medians = {keep: {name: median(run[name] for run in runs) for name in runs[0]} for keep, runs in found.items()}
    for keep, values in medians.items():
        print(json.dumps({"kept": keep, "rounds": given.rounds, "steps": given.steps} | values))
    print(json.dumps({f"{name}_ratio": round(medians[True][name] / medians[False][name], 3) for name in medians[True]}))


if __name__ == "__main__":
    main()
