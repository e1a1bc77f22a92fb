"""`python -m experiments.published [--out FILE] [--plot FILE]`: simulated steps beside published tables.

`--sensitivities`: in their place, each score with each chosen constant otherwise, one at a time."""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

from experiments.published.canvas import Canvas, beside_panel
from experiments.published.machine import FIT, HELD_OUT, Row, read_table
from experiments.published.omnibal import omnibal_rows
from experiments.published.points import point_rows
from experiments.published.sequences import longest_rows, longvila_rows, ray_rows

COLOURS = {FIT: "#202020", HELD_OUT: "#00798c"}


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write a PNG of all rows that have two figures."""
    panels: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row["error"] is not None:
            ratios = row["group"] == "ratios"
            panels.setdefault(
                (row["source"].split(" (")[0].split(",")[0], "ratio" if ratios else _unit(row)), []
            ).append(row)
    canvas = Canvas(len(panels))
    left = canvas.left(0)
    canvas.text(left, 10, "predicted (up) beside published (across); the line: equal")
    for at, (role, colour) in enumerate(COLOURS.items()):
        canvas.dot(left + 380 + at * 110, 17, colour)
        canvas.text(left + 390 + at * 110, 10, role.replace("_", " "))
    for at, ((source, unit), own) in enumerate(panels.items()):
        points = [(row["published"], row["predicted"], COLOURS[row["role"]]) for row in own]
        beside_panel(canvas, canvas.left(at), f"{source}: {unit}", points)
    canvas.save(path)


def _unit(row: Row) -> str:
    return str(row["unit"].split(";")[0].split(",")[0].split(" for ")[0])


def all_rows() -> tuple[list[Row], list[Row]]:
    """Rows of all published tables, and their scores."""
    cells, of_cells, fitted = ray_rows()
    long, of_long, of_steps = longvila_rows(fitted)
    days, of_days = omnibal_rows()
    points, of_points = point_rows()
    scores = [of_cells, *of_long, *of_days, *of_points]
    return [*cells, *long, *longest_rows(of_steps), *days, *points], scores


def sensitivities() -> Iterator[Row]:
    """The scores of a table with each of its chosen constants otherwise, one at a time."""
    of_table: dict[str, Callable[[], Sequence[Row]]] = {
        "ray_cells": lambda: [ray_rows()[1]],
        "longvila": lambda: longvila_rows(ray_rows()[2])[1],
        "omnibal": lambda: omnibal_rows()[1],
    }
    for table, scores in of_table.items():
        before = {one["score"]: one for one in scores()}
        for constant in read_table(table)["chosen"]:
            for other in constant.get("others", ()):
                with _otherwise([constant["at"], *constant.get("beside", ())], other) as chosen:
                    for one in scores():
                        was = before[one["score"]]
                        if any(one.get(key) != was.get(key) for key in _SCORES):
                            yield _changed(constant["constant"], chosen, other, was, one)


_SCORES = ("median", "max", "batches_right")


def _changed(constant: str, chosen: Any, other: Any, was: Row, one: Row) -> Row:
    figures = {f"{key}_chosen": was[key] for key in _SCORES if key in was} | {
        key: one[key] for key in _SCORES if key in one
    }
    return {"sensitivity": constant, "score_of": one["score"], "chosen": chosen, "other": other, **figures}


@contextmanager
def _otherwise(places: Sequence[Sequence[str]], other: Any) -> Iterator[Any]:
    """These places of the tables with another value meanwhile; what stood in the first of them."""
    of_places = []
    for table, *path, key in places:
        section = reduce(lambda inner, name: inner[name], path, read_table(table))
        of_places.append((section, key, section[key]))
        section[key] = other
    try:
        yield of_places[0][2]
    finally:
        for section, key, value in of_places:
            section[key] = value


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.published", description=__doc__)
    parser.add_argument("--out", type=Path, help="file for the same lines")
    parser.add_argument("--plot", type=Path, help="PNG of predicted figures beside published ones")
    parser.add_argument("--sensitivities", action="store_true", help="scores with other constants")
    asked = parser.parse_args(arguments)
    if asked.sensitivities:
        rows, scores = [], list(sensitivities())
    else:
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
