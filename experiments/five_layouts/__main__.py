"""`python -m experiments.five_layouts --trained DIR [--steps N] [--batch N] [--read FILE …] [--plot FILE]`.

DIR: that of `make example`, whose composed model and data are used."""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from dhp.batch.reader import make_reader
from dhp.plan.batches import feed_settings
from dhp.report import charts
from dhp.report.charts import Drawing, Label, Polyline, Scale
from experiments.commands import TRAINED, command_of
from experiments.five_layouts.training import LAYOUTS, Training, begin_plain

PLAIN, KILLED = "plain transformers and peft", "ulysses 2 + tensor 3, killed, then pipeline 2"
Row = dict[str, Any]


def plain_steps(training: Training) -> list[tuple[float, float]]:
    """Loss and seconds of each step by the plain model, each sample by itself."""
    config = training.config()
    oracle, feed, found = begin_plain(config, training.steps), make_reader(feed_settings(config)), []
    for step in range(training.steps):
        samples = [s for rows in feed.samples(step).samples for row in rows for s in row]
        begun = time.perf_counter()
        found.append((oracle.step(samples).loss, time.perf_counter() - begun))
    return found


def rows_of(training: Training) -> Iterator[Row]:
    """The plain loop, each layout, and one that is killed on its way."""
    plain = plain_steps(training)
    losses = [loss for loss, _ in plain]
    yield _row(PLAIN, losses, losses, [seconds for _, seconds in plain])
    for name in LAYOUTS:
        found = training.run(name, name)
        yield _row(name, [one.loss or 0.0 for one in found], losses, [one.step_s for one in found])
    found, saved = training.run_killed("ulysses 2 + tensor 3", "pipeline 2", training.steps // 2)
    yield _row(KILLED, [one.loss or 0.0 for one in found], losses, [one.step_s for one in found]) | {"killed": saved}


def _row(name: str, found: Sequence[float], plain: Sequence[float], seconds: Sequence[float]) -> Row:
    apart = max(abs(a - b) / b for a, b in zip(found, plain, strict=True))
    return {
        "layout": name, "steps": len(found), "loss_error": apart, "step_s": round(median(seconds[2:]), 3),
        "losses": list(found), "command": command_of("five_layouts"),
    }  # fmt: skip


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG: losses over steps. Curves that are equal lie on one another, so that each has points of its own."""
    count, most, bottom = rows[0]["steps"], max(max(row["losses"]) for row in rows), charts.HEIGHT - charts.BOTTOM
    across, up = Scale(1, count, charts.LEFT, charts.WIDTH - charts.RIGHT), Scale(0.0, most, bottom, charts.TOP)
    shapes = charts.draw_axes(across, up, "step", "loss", whole=True)
    for number, row in enumerate(rows):
        places = [(across(step), up(loss)) for step, loss in enumerate(row["losses"], start=1)]
        shapes.append(Polyline(places, number, thin=True))
        shapes += [charts.Dot(x, y, number, row["layout"], "") for x, y in places[number :: len(rows)]]
        left, top = charts.LEFT + 0.4 * charts.WIDTH, charts.TOP + 20 * number
        words = "" if row["layout"] == PLAIN else f", within {row['loss_error']:.0e}"
        shapes += [charts.Box(left, top - 9, 10, 10, number), Label(left + 16, top, row["layout"] + words)]
        if "killed" in row:
            at = across(row["killed"])
            shapes.append(Polyline([(at, charts.TOP), (at, bottom)], charts.INK, dashed=True, thin=True))
            shapes.append(Label(at - 6, charts.TOP + 60, "killed", "end"))
    title = "losses of one training in every layout"
    Drawing(path.stem, title, charts.WIDTH, charts.HEIGHT, shapes).write_png(path.parent)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(TRAINED, type=Path, help="the folder of `make example`")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--batch", type=int, default=16, help="samples a step")
    parser.add_argument("--read", nargs="+", type=Path, default=[], help="rows of earlier runs")
    parser.add_argument("--plot", type=Path, help="a PNG file to write")
    given = parser.parse_args(arguments)
    rows = [json.loads(line) for file in given.read for line in file.read_text(encoding="utf-8").splitlines()]
    if given.trained is not None:
        with tempfile.TemporaryDirectory() as folder:
            for row in rows_of(Training(given.trained, Path(folder), given.steps, given.batch)):
                rows.append(row)
                print(json.dumps(row), flush=True)
    if given.plot is not None:
        draw(rows, given.plot)


if __name__ == "__main__":
    main()
