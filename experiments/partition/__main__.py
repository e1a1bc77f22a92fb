"""`python -m experiments.partition [--only QUESTION] [--rounds 5]`: cuts, beside published ones and as steps."""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from experiments.partition.chain import replayed, walls
from experiments.partition.published import compared

PUBLISHED = "published"  # columns of OmniBal's tables from public shapes; its rows are the same in every round
# From rounds to rows: seconds of a step of a small model's chain, by replay; wall time of real chains beside that.
QUESTIONS: dict[str, Callable[[int], Iterator[dict[str, Any]]]] = {
    PUBLISHED: lambda rounds: compared(), "replay": replayed, "wall": walls,
}  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.partition", description=__doc__)
    parser.add_argument("--only", choices=QUESTIONS, help="one of the questions")
    parser.add_argument("--rounds", type=int, default=5, help="of replayed steps")
    asked = parser.parse_args(arguments)
    for name in [asked.only] if asked.only else QUESTIONS:
        command = f"python -m experiments.partition --only {name}"
        command += f" --rounds {asked.rounds}" if name != PUBLISHED else ""
        for row in QUESTIONS[name](asked.rounds):
            print(json.dumps(row | {"command": command}), flush=True)


if __name__ == "__main__":
    main()
