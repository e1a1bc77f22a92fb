"""`python -m experiments.sight [--seeds …] [--ways …] [--read FILE …]`: does a run learn from the picture?"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from experiments.commands import command_of
from experiments.sight.ways import WAYS, Row, Seed, Size, goal, sentence


def read_rows(files: Iterable[Path]) -> list[Row]:
    """The rows that earlier runs printed, without their ends."""
    lines = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if "what" in line]


def rows(given: argparse.Namespace) -> Iterator[Row]:
    """Of every seed and way. Layouts are compared with the first seed alone."""
    steps = given.steps, given.canary_steps or given.steps, given.adapt_steps, given.layout_steps
    size = Size(*steps, given.samples, given.rounds, given.plain)
    for seed in given.seeds:
        with tempfile.TemporaryDirectory(prefix="dhp-sight-", dir=given.folder) as folder:
            ways = [way for way in given.ways if way != "layouts" or seed == given.seeds[0]]
            yield from Seed(Path(folder), seed, size, given.trained).rows(ways)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.sight")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2], help="none: only what was read")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, default=5000, help="from scratch")
    parser.add_argument("--canary-steps", type=int, help="of each canary; by default as many as from scratch")
    parser.add_argument("--adapt-steps", type=int, default=1000, help="with other names of colours")
    parser.add_argument("--layout-steps", type=int, default=30)
    parser.add_argument("--samples", type=int, default=30000, help="to train on")
    parser.add_argument("--rounds", type=int, default=4, help="of held-out questions, 16 or 25 of a kind in each")
    parser.add_argument("--plain", type=int, default=100, help="questions for plain transformers")
    parser.add_argument("--trained", type=Path, help="what an earlier run exported of the one seed, for `scratch`")
    parser.add_argument("--folder", type=Path, help="for models and data while it runs")
    parser.add_argument("--read", nargs="+", type=Path, default=[], help="rows of earlier runs")
    given = parser.parse_args(arguments)
    if {"exported", "renamed_projector", "renamed_lora", "renamed_all"} & set(given.ways) - {"scratch"}:
        if "scratch" not in given.ways and given.seeds and given.trained is None:
            parser.error(
                "exported and renamed_… start from what scratch trains: name it in --ways too, or --trained DIR"
            )
    if given.trained is not None and ("scratch" in given.ways or len(given.seeds) != 1):
        parser.error("--trained is of one seed, and in the place of scratch")
    if given.folder is not None:
        given.folder.mkdir(parents=True, exist_ok=True)
    found = read_rows(given.read)
    command = command_of("sight", arguments)
    for row in rows(given):
        print(json.dumps(dict(row) | {"command": command}), flush=True)
        found.append(row)
    last = goal(found)
    print(json.dumps(last | {"command": command}), flush=True)
    print(sentence(last, found), file=sys.stderr)


if __name__ == "__main__":
    main()
