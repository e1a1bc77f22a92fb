"""`python -m experiments.layouts.chart`: seconds a step of dhp's layouts and of their peers, of the run in
results/layouts.jsonl that has most of them, as docs/layouts.svg, right on light pages and dark ones."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dhp.report.charts import PALETTE, Bar, Box, Drawing, spread_bars

ROOT = Path(__file__).parents[2]
ROWS, PICTURE = ROOT / "results" / "layouts.jsonl", ROOT / "docs" / "layouts.svg"
SHAPE = "vision-dominated"
NAMES = {
    "plain": "plain, one process", "ddp": "DDP", "fsdp2": "FSDP2", "deepspeed-zero3": "DeepSpeed ZeRO-3",
    "deepspeed-autosp": "DeepSpeed AutoSP", "transformers-tp": "transformers TP",
}  # fmt: skip
PEER, OURS = 6, 0  # colours
_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #6a7078 } polyline { fill: none; stroke-width: 1 }
.l9 { stroke: #8a8f98; stroke-opacity: .35 }
"""

Row = dict[str, Any]


def main() -> None:
    rows = [json.loads(line) for line in ROWS.read_text(encoding="utf-8").splitlines()]
    PICTURE.write_text(as_file(drawing(rows)), encoding="utf-8")


def chosen(rows: Sequence[Row]) -> list[Row]:
    """Of the runs on one host the rows of the one that has most peers; of the last one, where several have as many."""
    runs: dict[str, list[Row]] = {}
    for row in rows:
        if row.get("shape") == SHAPE and "--links" not in row["command"]:
            runs.setdefault(row["command"], []).append(row)
    return max(reversed(runs.values()), key=lambda run: len({row["layout"] for row in run if row["peer"]}))


def drawing(rows: Sequence[Row]) -> Drawing:
    """A bar a layout, those of one size below one another; dhp's in their own colour."""
    run = chosen(rows)
    sizes = sorted({row["patches"] for row in run})
    by_bar = {_name(row): row for size in sizes for row in run if row["patches"] == size}
    bars = {name: Bar(row["step_s"], row["step_s"], row["step_s"]) for name, row in by_bar.items()}
    title = f"Seconds a step, two images of {' or '.join(f'{size:,}' for size in sizes)} patches, two CPU cores"
    drawn = spread_bars("layouts", title, bars, "seconds a step (medians, taken in turns)")
    peers = iter(row["peer"] for row in by_bar.values())
    shapes = [
        replace(shape, colour=PEER if next(peers) else OURS) if isinstance(shape, Box) else shape
        for shape in drawn.shapes
    ]
    return replace(drawn, shapes=shapes)


def as_file(drawn: Drawing) -> str:
    """A drawing as a file of its own, with its colours in it."""
    used = {shape.colour for shape in drawn.shapes if isinstance(shape, Box)}
    fills = " ".join(f".f{colour} {{ fill: {PALETTE[colour]} }}" for colour in sorted(used))
    body = drawn.svg().replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return body.replace("<title>", f"<style>{_STYLE}{fills}</style><title>", 1) + "\n"


def _name(row: Row) -> str:
    own = NAMES.get(row["layout"]) or f"dhp {row['layout']}"
    return f"{row['patches']:,}: {own}"


if __name__ == "__main__":
    main()
