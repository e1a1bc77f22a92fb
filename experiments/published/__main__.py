"""`python -m experiments.published [--out FILE] [--plot FILE]`: simulated steps beside published tables."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from experiments.published.longvila import longvila_rows
from experiments.published.omnibal import omnibal_rows
from experiments.published.plot import draw
from experiments.published.ray_cells import ray_rows
from experiments.published.tables import Row


def all_rows() -> tuple[list[Row], list[Row]]:
    """Rows of all tables, and their scores."""
    cells, of_cells, fitted = ray_rows()
    long, of_long, _ = longvila_rows(fitted)
    days, of_days = omnibal_rows()
    return [*cells, *long, *days], [of_cells, *of_long, *of_days]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a JSON line for each row, then one for each score."""
    parser = argparse.ArgumentParser(prog="python -m experiments.published", description=__doc__)
    parser.add_argument("--out", type=Path, help="file for the same lines")
    parser.add_argument("--plot", type=Path, help="PNG of predicted figures beside published ones")
    asked = parser.parse_args(arguments)
    rows, scores = all_rows()
    command = {"command": "python -m experiments.published"}
    lines = [json.dumps(row | command, ensure_ascii=False) for row in [*rows, *scores]]
    print("\n".join(lines))
    if asked.out:
        asked.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if asked.plot:
        draw(rows, asked.plot)


if __name__ == "__main__":
    main()
