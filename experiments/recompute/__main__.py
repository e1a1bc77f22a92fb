"""`python -m experiments.recompute speed|peaks|sequence`: what adaptive recomputation saves, and how well it knows."""

from __future__ import annotations

import argparse
import json

from experiments.recompute import peaks, sequence, speed


def main() -> None:
    """Print the figures, a JSON object a line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question", choices=["speed", "peaks", "sequence"], nargs="?", default="speed")
    parser.add_argument("--rounds", type=int, default=11, help="of speed")
    parser.add_argument("--side", type=int, default=128, help="of sequence: patches along one side of the image")
    given = parser.parse_args()
    rows = {
        "speed": lambda: speed.measure(given.rounds),
        "peaks": peaks.measure,
        "sequence": lambda: sequence.measure(given.side),
    }
    for row in rows[given.question]():
        print(json.dumps(row, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
