"""`python -m experiments.partition [--only QUESTION] [--rounds 5]`: cuts."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

Rows = Iterator[dict[str, Any]]


def published(rounds: int) -> Rows:
    """The columns of OmniBal's tables from public shapes."""
    from experiments.partition.published import compared

    return compared()


def replay(rounds: int) -> Rows:
    """Seconds of a step of a small model's chain, by replay."""
    from experiments.partition.chain import replayed

    return replayed(rounds)


def chains(rounds: int) -> Rows:
    """A step of a large model's chain, as it is planned."""
    from experiments.partition.chain import chains as planned

    return planned()


def wall(rounds: int) -> Rows:
    """Wall time of real chains of two devices, beside their replay."""
    from experiments.partition.chain import walls

    return walls(rounds)


QUESTIONS: Mapping[str, Callable[[int], Rows]] = {
    "published": published, "chains": chains, "replay": replay, "wall": wall
}  # fmt: skip
PLANNED = ("published", "chains")  # whose rows are the same in every round


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a JSON line for each row."""
    parser = argparse.ArgumentParser(prog="python -m experiments.partition", description=__doc__)
    parser.add_argument("--only", choices=QUESTIONS, help="one of the questions")
    parser.add_argument("--rounds", type=int, default=5, help="of replayed steps")
    asked = parser.parse_args(arguments)
    for name in [asked.only] if asked.only else QUESTIONS:
        command = f"python -m experiments.partition --only {name}"
        command += f" --rounds {asked.rounds}" if name not in PLANNED else ""
        for row in QUESTIONS[name](asked.rounds):
            print(json.dumps(row | {"command": command}), flush=True)


if __name__ == "__main__":
    main()
