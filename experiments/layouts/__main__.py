"""`python -m experiments.layouts [--rounds N] [--sizes 1k 4k …] [--shapes …]`: dhp's layouts and its peers, same work."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import torch.multiprocessing as multiprocessing

from experiments.layouts.ours import LAYOUTS, time_layout
from experiments.layouts.peers import PEERS, time_peer
from experiments.layouts.work import DECODERS, SIDES, count_tokens, make_batch, make_model

Times = dict[str, tuple[list[float], float]]  # by size: seconds of the steps, last loss
LIMIT = "plain"


def run_peer(kind: str, model: str, batches: dict, steps: int) -> Times:
    """A peer in processes of its own: one with all threads for the plain model, else two."""
    ranks = 1 if kind == LIMIT else 2
    answers = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, str(Path(folder) / "store"), kind, model, batches, steps, answers)
        multiprocessing.spawn(time_peer, arguments, nprocs=ranks)
    return answers.get()


def measure(shape: str, sizes: list[str], rounds: int, steps: int) -> list[dict[str, Any]]:
    """Rounds that visit every layout and peer in turn; a row for each of them and each size."""
    batches = {size: make_batch(size) for size in sizes}
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    losses: dict[tuple[str, str], float] = {}
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_model(Path(folder), shape))
        for _ in range(rounds):
            for name in (*PEERS, *LAYOUTS):
                run = run_peer if name in PEERS else time_layout
                for size, (seconds, loss) in run(name, model, batches, steps).items():
                    times[name, size] += seconds
                    losses[name, size] = loss
    return [_row(shape, name, size, times, losses, batches) for size in sizes for name in (*PEERS, *LAYOUTS)]


def _row(shape: str, name: str, size: str, times: dict, losses: dict, batches: dict) -> dict[str, Any]:
    step_s, limit_s = median(times[name, size]), median(times[LIMIT, size])
    return {
        "layout": name,
        "peer": name in PEERS,
        "shape": shape,
        "patches": SIDES[size] ** 2,
        "step_s": round(step_s, 4),
        "tokens_per_s": round(count_tokens(batches[size]) / step_s, 1),
        "efficiency": round(limit_s / step_s, 3),
        "steps": len(times[name, size]),
        "loss": losses[name, size],
    }


def main() -> None:
    """Print a JSON line for each row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--sizes", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--shapes", nargs="+", choices=DECODERS, default=list(DECODERS))
    given = parser.parse_args()
    for shape in given.shapes:
        for row in measure(shape, given.sizes, given.rounds, given.steps):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
