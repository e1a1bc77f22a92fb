"""The table of docs/parallelism.md: the planned layout by model, devices and tokens of a row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.marks import put_between

PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"
BEGIN, END = "<!-- layout_choice: begin -->", "<!-- layout_choice: end -->"
_HEAD = "| model | H100s | tokens of a row | text | vision | recompute (text; vision) | tokens/s a GPU | MFU | GiB |"
_LONGEST = 24  # characters of a recompute that is written out

Row = dict[str, Any]


def table(rows: Sequence[Row]) -> str:
    """A line for each row that plans something."""
    return "\n".join([_HEAD, "|---|---|---|---|---|---|---|---|---|", *map(_line, (r for r in rows if "fits" in r))])


def with_table(page: str, rows: Sequence[Row]) -> str:
    """The page with this table in it. Raises ValueError for a page without the marks."""
    return put_between(page, BEGIN, END, table(rows))


def _line(row: Row) -> str:
    head = [row["model"].upper(), row["devices"], f"{row['tokens']:,}"]
    if not row["fits"]:
        return _cells([*head, f"nothing fits; {', or '.join(row['instead'][:2])} would", "", "", "", "", ""])
    recompute = "; ".join(_short(row[f"{part}_recompute"]) for part in ("text", "vision"))
    doubt = "" if row["sure"] else "?"
    figures = [f"{row['tokens_s_device']:,}", f"{row['mfu']:.0%}", f"{row['gib']}{doubt}"]
    return _cells([*head, row["text"], row["vision"], recompute, *figures])


def _short(recompute: str) -> str:
    """A recompute as its key has it; a long one by the kinds in it."""
    if len(recompute) <= _LONGEST:
        return recompute
    return "mixed: " + ", ".join(dict.fromkeys(one.partition(":")[0] for one in recompute.split(",")))


def _cells(values: Sequence[Any]) -> str:
    return f"| {' | '.join(map(str, values))} |"
