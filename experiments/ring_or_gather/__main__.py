"""`python -m experiments.ring_or_gather [--rounds N]`: keys and values passed around, or all gathered at once."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch.multiprocessing as multiprocessing

from experiments.ring_or_gather.rank import measure


def main() -> None:
    """Print a JSON line for each ring length and number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rings", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--tokens", type=int, nargs="+", default=[256, 1024, 4096])
    given = parser.parse_args()
    for ranks in given.rings:
        answers = multiprocessing.get_context("spawn").SimpleQueue()
        with tempfile.TemporaryDirectory() as folder:
            store = str(Path(folder) / "store")
            multiprocessing.spawn(measure, (ranks, store, given.tokens, given.rounds, answers), nprocs=ranks)
        while not answers.empty():
            print(json.dumps(answers.get()), flush=True)


if __name__ == "__main__":
    main()
