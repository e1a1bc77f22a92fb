"""`python -m experiments.imbalance [--ways WAY …] [--steps 6] [--plot FILE] [--read FILE]`: how uneven are stages?"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from experiments.imbalance.plot import draw
from experiments.imbalance.ways import WAYS, published_rows

STEPS = 6


def measured_rows(ways: Sequence[str], steps: int) -> Iterator[dict[str, Any]]:
    """Of each way, one after another, then what was published."""
    from experiments.imbalance.measured import make_work, measure

    with tempfile.TemporaryDirectory(prefix="dhp-imbalance-") as folder:
        work = make_work(Path(folder), steps)
        for way in ways:
            yield from measure(way, steps, work)
    yield from published_rows()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a JSON line for each row."""
    parser = argparse.ArgumentParser(prog="python -m experiments.imbalance", description=__doc__)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=" | ".join(WAYS))
    parser.add_argument("--steps", type=int, default=STEPS, help="of 32 samples; in the first nothing is timed")
    parser.add_argument("--plot", type=Path, help="a PNG file to write")
    parser.add_argument("--read", type=Path, help="a file of rows to draw; nothing is trained")
    given = parser.parse_args(arguments)
    if given.steps < 2:
        parser.error(f"--steps {given.steps}: nothing is timed in the first step; take 2 or more")
    if given.read is not None:
        rows = [json.loads(line) for line in given.read.read_text(encoding="utf-8").splitlines()]
    else:
        chosen = "" if given.ways == list(WAYS) else " --ways " + " ".join(f"'{way}'" for way in given.ways)
        command = {"command": f"python -m experiments.imbalance{chosen} --steps {given.steps}"}
        rows = []
        for row in measured_rows(given.ways, given.steps):
            rows.append(row | command)
            print(json.dumps(rows[-1], ensure_ascii=False), flush=True)
    if given.plot is not None:
        draw(rows, given.plot)


if __name__ == "__main__":
    main()
