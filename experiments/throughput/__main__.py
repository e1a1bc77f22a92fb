"""`python -m experiments.throughput [--models …] [--sizes …] [--layouts …]`: patches a second by a picture's length,
with the largest batch that fits into a device."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from dhp.engine.engines import make_rank
from experiments.commands import command_of
from experiments.plan_accuracy.layout import running
from experiments.published.tables import read_table
from experiments.throughput.cells import LAYOUTS, MIB, SHAPES, SIDES, Cell, Fit, budget_of, cells_of, find_batch
from experiments.throughput.counted import count_device
from experiments.throughput.plot import draw

LONG_S = 60.0  # a step that takes longer is timed once, in the first round
SHORT_S, STEPS = 10.0, 2  # of a step that takes less, so many are timed each round, else one
CHECKED = 6  # of so many cells one is counted
Row = dict[str, Any]


def rows(models: Path, given: argparse.Namespace) -> Iterator[Row]:
    """A row for each cell; layouts of a size take turns."""
    number = 0
    published = {(row["layout"], row["patches"]): row["published"] for row in read_table("ray_cells")["rows"]}
    for model in given.models:
        budget = given.budget_mib * MIB if given.budget_mib else budget_of(models, model)
        for cells in cells_of(models, model, given.sizes, given.layouts):
            fits = {cell: find_batch(cell, budget) for cell in cells}
            seconds = time_cells(fits, given.rounds)
            for cell, fit in fits.items():
                row = row_of(cell, fit, budget, seconds[cell])
                if model == "32B":
                    row["published_patches_per_s"] = published.get((cell.layout, row["patches"]))
                if given.check and number % CHECKED == 0:
                    row |= counted(cell, fit, budget)
                number += 1
                yield row


def time_cells(fits: dict[Cell, Fit], rounds: int) -> dict[Cell, list[float]]:
    """Seconds of steps of each cell that fits."""
    seconds: dict[Cell, list[float]] = {cell: [] for cell in fits}
    for _ in range(rounds):
        for cell, fit in fits.items():
            own = seconds[cell]
            if fit.batch and not (own and own[-1] > LONG_S):
                with running(cell.of_batch(fit.batch), make_rank) as run:
                    own += run.train(1)[0]
                    if own[-1] <= SHORT_S:
                        own += run.train(STEPS - 1)[0]
    return seconds


def row_of(cell: Cell, fit: Fit, budget: int, seconds: Sequence[float]) -> Row:
    """patches_per_s: before merging, None where no batch fits."""
    patches = SIDES[cell.size] ** 2
    step_s = median(seconds) if seconds and fit.batch else None
    return {
        "model": cell.model,
        "size": cell.size,
        "patches": patches,
        "layout": cell.layout,
        "batch": fit.batch,
        "fits": bool(fit.batch),
        "budget_mib": round(budget / MIB, 1),
        "planned_mib": round(fit.nbytes / MIB, 1),
        "step_s": None if step_s is None else round(step_s, 4),
        "patches_per_s": None if step_s is None else round(fit.batch * patches / step_s, 1),
        "steps": len(seconds),
    }


def counted(cell: Cell, fit: Fit, budget: int) -> Row:
    """Live bytes of a step that fits, and of one with the next larger batch, which does not: whether both are as the
    plan said."""
    found: Row = {}
    if fit.batch:
        found["counted_mib"] = round(count_device(cell.of_batch(fit.batch)) / MIB, 1)
    if fit.larger:
        found["larger_batch"], found["larger_mib"] = fit.larger, round(count_device(cell.of_batch(fit.larger)) / MIB, 1)
    inside = found.get("counted_mib", 0.0) * MIB <= budget
    return found | {"as_planned": inside and found.get("larger_mib", float("inf")) * MIB > budget}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a JSON line for each cell."""
    parser = argparse.ArgumentParser(prog="python -m experiments.throughput", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=list(SHAPES), help="scaled by 16 and 8")
    parser.add_argument("--sizes", nargs="+", choices=SIDES, default=list(SIDES), help="patches of a picture")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--budget-mib", type=float, help="of a device; by default what the longest picture needs")
    parser.add_argument("--no-check", dest="check", action="store_false", help="count no cell's bytes")
    parser.add_argument("--read", type=Path, help="rows of an earlier run, for --plot; nothing runs")
    parser.add_argument("--plot", type=Path, help="PNG of all rows")
    given = parser.parse_args(arguments)
    command = command_of("throughput", arguments)
    if given.read is not None:
        found = [
            row for line in given.read.read_text(encoding="utf-8").splitlines() if "layout" in (row := json.loads(line))
        ]
    else:
        found = []
        with tempfile.TemporaryDirectory(prefix="dhp-throughput-") as folder:
            for row in rows(Path(folder), given):
                found.append(row | {"command": command})
                print(json.dumps(found[-1]), flush=True)
    if given.plot:
        draw(found, given.plot)


if __name__ == "__main__":
    main()
