"""`python -m experiments.needle_frames [--seeds 0] [--frames N …]`: does training on longer videos find more in longer
ones?"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from experiments.commands import command_of
from experiments.needle_frames.plot import draw
from experiments.needle_frames.runs import TRAINED_ON, Size, rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a JSON line for each seed, model and number of frames."""
    parser = argparse.ArgumentParser(prog="python -m experiments.needle_frames", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=TRAINED_ON, default=["short", "long"], help="by what they learn")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0], help="none: only what was read")
    parser.add_argument("--samples", type=int, default=512, help="to train on")
    parser.add_argument("--steps", type=int, help="of training; those of the configuration by default")
    parser.add_argument("--frames", nargs="+", type=int, default=[8, 16, 32, 64, 128, 256, 512])
    parser.add_argument("--needles", type=int, default=6, help="at each length and depth")
    parser.add_argument("--read", nargs="+", type=Path, default=[], help="rows of earlier runs")
    parser.add_argument("--plot", type=Path, help="PNG of all rows")
    given = parser.parse_args(arguments)
    command = command_of("needle_frames", arguments)
    lines = [json.loads(line) for file in given.read for line in file.read_text(encoding="utf-8").splitlines()]
    found = [line for line in lines if "trained_on" in line]
    with tempfile.TemporaryDirectory(prefix="dhp-needles-") as folder:
        size = Size(given.samples, given.steps, given.frames, given.needles)
        for row in rows(given.models, given.seeds, size, Path(folder)):
            print(json.dumps(row | {"command": command}), flush=True)
            found.append(row)
    if given.plot is not None:
        draw([row for row in found if row["trained_on"] != "longest"], given.plot)  # which learns too little to compare


if __name__ == "__main__":
    main()
