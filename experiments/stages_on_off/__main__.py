"""`python -m experiments.stages_on_off [--ways WAY …] [--seeds 0] [--last-steps 60]`: what do two stages give?"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from experiments.stages_on_off.ways import WAYS

LAST_STEPS, SAMPLES = 60, 32


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a JSON line for each seed and way."""
    parser = argparse.ArgumentParser(prog="python -m experiments.stages_on_off", description=__doc__)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), metavar="WAY", help=" | ".join(WAYS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, help="of each other stage; those of the configuration by default")
    parser.add_argument("--last-steps", type=int, default=LAST_STEPS, help="of the last stage, on long videos")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of each held-out set")
    given = parser.parse_args(arguments)
    from experiments.stages_on_off.runs import Lengths, rows

    command = f"python -m experiments.stages_on_off --seeds {' '.join(map(str, given.seeds))}"
    command += f" --last-steps {given.last_steps} --samples {given.samples}"
    command += "" if given.steps is None else f" --steps {given.steps}"
    command += "" if given.ways == list(WAYS) else " --ways " + " ".join(f"'{way}'" for way in given.ways)
    with tempfile.TemporaryDirectory(prefix="dhp-stages-") as folder:
        lengths = Lengths(given.steps, given.last_steps, given.samples)
        for row in rows(given.ways, given.seeds, lengths, Path(folder)):
            print(json.dumps(row | {"command": command}), flush=True)


if __name__ == "__main__":
    main()
