"""`python -m experiments.overlap [--rounds N]`: gradient sums while backward runs, against all of them after it."""

from __future__ import annotations

import argparse
import json
import socket

import torch.multiprocessing as multiprocessing

from experiments.overlap.rank import RANKS, measure


def main() -> None:
    """Print a JSON line for each number format."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    rounds = parser.parse_args().rounds
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    answers = multiprocessing.get_context("spawn").SimpleQueue()
    multiprocessing.spawn(measure, (port, rounds, answers), nprocs=RANKS)
    while not answers.empty():
        print(json.dumps(answers.get()))


if __name__ == "__main__":
    main()
