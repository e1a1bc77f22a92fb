"""`python -m experiments.convergence [--methods …] [--seeds …] [--epochs N] [--read FILE …] [--plot FILE]`."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean

from dhp.report.charts import Line, line_chart
from experiments.convergence.summary import METHODS, Row, methods_of, summaries

TITLE = "held-out loss over samples seen, means over seeds"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG: for each method the mean over seeds at each checkpoint."""
    curves = {method: _curve(rows, method) for method in methods_of(rows)}
    lines = [Line(name, [x for x, _ in points], [y for _, y in points]) for name, points in curves.items()]
    drawn = line_chart(path.stem, TITLE, lines, "nats a token")
    drawn.write_png(path.parent)


def _curve(rows: Sequence[Row], method: str) -> list[tuple[int, float]]:
    """For each checkpoint in order: means of the samples seen and of the loss, over seeds."""
    by_seed: dict[int, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row["step"]):
        if row["method"] == method:
            by_seed.setdefault(row["seed"], []).append(row)
    together = zip(*by_seed.values(), strict=False)  # a seed's epoch may have a checkpoint more than another's
    return [(round(mean(row["samples"] for row in at)), mean(row["heldout_loss"] for row in at)) for at in together]


def read_rows(files: Iterable[Path]) -> list[Row]:
    """The rows that earlier runs printed, without their summaries."""
    lines = [json.loads(line) for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    return [line for line in lines if "method" in line]


def train_all(given: argparse.Namespace) -> list[Row]:
    """Every method with one seed, then with the next; prints each row when it is known."""
    from experiments.convergence.trained import make_work, run  # not for a plot of what was read

    rows = []
    with tempfile.TemporaryDirectory() as folder:
        work = make_work(Path(folder), given.epochs, given.save_steps, given.samples, given.held_out)
        for seed in given.seeds:
            for method in given.methods:
                for row in run(method, seed, work):
                    print(json.dumps(row), flush=True)
                    rows.append(row)
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a JSON line for each checkpoint, and a summary of each method, earlier rows included."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2], help="none: only what was read")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--samples", type=int, default=384, help="to train on")
    parser.add_argument("--held-out", type=int, default=128, help="samples")
    parser.add_argument("--save-steps", type=int, default=16, help="optimizer steps between two evaluations")
    parser.add_argument("--read", nargs="+", type=Path, default=[], help="rows of earlier runs")
    parser.add_argument("--plot", type=Path, help="a PNG file to write")
    given = parser.parse_args(arguments)
    rows = read_rows(given.read)
    rows += train_all(given) if given.seeds else []
    for line in summaries(rows):
        print(json.dumps(line), flush=True)
    if given.plot is not None:
        draw(rows, given.plot)


if __name__ == "__main__":
    main()
