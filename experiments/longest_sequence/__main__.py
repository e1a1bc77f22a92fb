"""`python -m experiments.longest_sequence [--ranks 1 2 4] [--recompute none] [--budget-mib 64] [--shape balanced]`."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from experiments.layouts.work import DECODERS, make_model
from experiments.longest_sequence.rank import find_longest, layouts
from experiments.ranks import on_ranks


def longest(model: str, name: str, ranks: int, recompute: str, budget_mib: int) -> dict[str, int]:
    """Patches of the longest image, by what is counted. Ends the program where not even one window fits."""
    found: dict[str, int] = on_ranks(ranks, find_longest, model, name, recompute, budget_mib)
    if not all(found.values()):
        raise SystemExit(f"longest_sequence: {name} on {ranks} ranks: one window takes more than {budget_mib} MiB")
    return found


def rows(model: str, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """For each layout and number of ranks one row by vision's activations and one by both parts'."""
    for name in given.only or layouts(1):
        one: dict[str, int] = {}
        for ranks in given.ranks:
            found = longest(model, name, ranks, given.recompute, given.budget_mib)
            one = one or found
            for counted, patches in found.items():
                yield {
                    "layout": name, "ranks": ranks, "counted": counted, "recompute": given.recompute,
                    "shape": given.shape, "budget_mib": given.budget_mib, "patches": patches,
                    "ratio_to_one_rank": round(patches / one[counted], 3),
                }  # fmt: skip


def main() -> None:
    """Print a JSON line for each row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], help="the first is what ratios refer to")
    parser.add_argument("--only", nargs="+", choices=layouts(1), help="these layouts")
    parser.add_argument("--recompute", default="none", help="of both parts, as vision.recompute")
    parser.add_argument("--budget-mib", type=int, default=64, help="for the activations of a rank")
    parser.add_argument("--shape", choices=DECODERS, default="balanced")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for row in rows(str(make_model(Path(folder), given.shape)), given):
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
