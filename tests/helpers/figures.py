"""Sentences made of the rows in results/, and those of them that a document does not have."""

import json
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
Row = dict[str, Any]
Sentences = Iterator[tuple[str, str]]  # of (page, what it must have)


def rows(name: str, **wanted: Any) -> list[Row]:
    """The rows of results/NAME.jsonl that have these values; not the one that says what they were made on."""
    found = map(json.loads, (ROOT / "results" / f"{name}.jsonl").read_text(encoding="utf-8").splitlines())
    return [
        row for row in found if "made_on" not in row and all(row.get(key) == value for key, value in wanted.items())
    ]


def one(name: str, **wanted: Any) -> Row:
    """The last of them: later runs replace earlier ones."""
    return rows(name, **wanted)[-1]


def span(values: list[float], digits: int = 2) -> str:
    """`0.72 to 0.95`"""
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def short(value: float, digits: int) -> str:
    """`.0317`, as the tables of shares have it."""
    return f"{value:.{digits}f}".removeprefix("0")


def cells(*values: str | int) -> str:
    """Neighbours in a row of a table; whole numbers as `1,024`."""
    return f"| {' | '.join(f'{value:,}' if isinstance(value, int) else value for value in values)} |"


def fixed(value: float, digits: int = 2) -> str:
    """With so many digits behind the point."""
    return f"{value:.{digits}f}"


def missing(sentences: Iterable[tuple[str, str]]) -> list[str]:
    """Those that their page does not have, wherever it breaks its lines."""
    return [f"{page}: {words}" for page, words in sentences if " ".join(words.split()) not in _text(page)]


@cache
def _text(page: str) -> str:
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())
