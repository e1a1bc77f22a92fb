"""Keys of other trainers: their names here, or why there are none.

`python -m dhp.config.foreign` prints the tables of docs/coming-from.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from dhp.config.foreign_keys import ENVIRONMENT, FOREIGN, Foreign
from dhp.config.nearest import nearest

HEADING = "## All keys"
TRAINERS = {"L": "LLaMA-Factory", "S": "ms-swift", "T": "transformers", "M": "others"}


def foreign_hint(path: str) -> str:
    """The hint for a key of other trainers, by its last name; empty when it is not known."""
    row = _rows().get(path.rpartition(".")[2].lower())
    return "" if row is None else f"; {_answer(row)}"


def mistyped_hint(path: str) -> str:
    """The hint for a key that is nearly one of another trainer's."""
    name = nearest(path.rpartition(".")[2].lower(), _rows())
    if name is None:
        return ""
    known = " and ".join(TRAINERS[letter] for letter in _rows()[name].of if letter != "M") or "other trainers"
    return f"; did you mean {name} of {known}? {_answer(_rows()[name])}"


def environment_notes(environment: Mapping[str, str]) -> list[str]:
    """A line for each variable that is set, that another trainer reads and that has no effect here."""
    rows = {name: row for row in ENVIRONMENT for name in row.names}
    noticed = {name: row for name, row in rows.items() if environment.get(name)}
    return [f"{name} is set in the environment and has no effect; {_answer(row)}" for name, row in noticed.items()]


def tables() -> str:
    """Markdown from `## All keys` on: a table for each topic, that of environment variables last."""
    parts = [f"{HEADING}\n"]
    for topic, rows in {**FOREIGN, "Environment variables": ENVIRONMENT}.items():
        lines = ["| there | known from | here |", "|---|---|---|", *map(_line, rows)]
        parts.append(f"### {topic}\n\n" + "\n".join(lines) + "\n")
    return "\n".join(parts)


@cache
def _rows() -> dict[str, Foreign]:
    return {name.lower(): row for rows in FOREIGN.values() for row in rows for name in row.names}


def _answer(row: Foreign) -> str:
    if not row.keys:
        return f"there is none: {row.say}"
    return f"here it is {' and '.join(row.keys)}" + (f" ({row.say})" if row.say else "")


def _line(row: Foreign) -> str:
    theirs = ", ".join(f"`{name}`" for name in row.names)
    known = ", ".join(TRAINERS[letter] for letter in row.of)
    here = ", ".join(f"`{key}`" for key in row.keys)
    said = re.sub(r"(?<!`)\b((?:training|data|text|vision|audio|cluster)\.[\w.]+\w(?:=\w+)?)", r"`\1`", row.say)
    return f"| {theirs} | {known} | {here + ('; ' if said else '') + said if here else f'– {said}'} |"


if __name__ == "__main__":
    print(tables(), end="")
