"""Prints the losses of two runs side by side. The exit status is 0 where they are equal up to rounding in float32."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

TOLERANCE = 1e-5  # relative


def main(run_dirs: list[Path]) -> int:
    """run_dirs: of two runs of as many steps."""
    lines = [(run_dir / "metrics.jsonl").read_text().splitlines() for run_dir in run_dirs]
    losses = [[json.loads(line)["loss"] for line in of_run] for of_run in lines]
    for step, pair in enumerate(zip(*losses, strict=True), 1):
        print(f"step {step}: {pair[0]:.6f} {pair[1]:.6f}")
    equal = all(math.isclose(*pair, rel_tol=TOLERANCE) for pair in zip(*losses, strict=True))
    print("equal" if equal else "not equal")
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main([Path(sys.argv[1]), Path(sys.argv[2])]))
