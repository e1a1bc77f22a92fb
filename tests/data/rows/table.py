"""The verdicts of rows as a table in Markdown."""

import re
from collections.abc import Sequence
from pathlib import Path

from tests.data.rows.outcome import Readers, verdict
from tests.data.rows.row import Row

HEADING = "## Row by row"
_SHOWN = 150  # characters of a refusal


def table(rows: Sequence[Row], folder: Path, readers: Readers) -> str:
    """Counts, then a line a row: source, form, what becomes of it, its case. folder: that `make_media` filled."""
    lines, count = [], {"read": 0, "refused": 0, "silent": 0}
    for row in rows:
        outcome, words = verdict(row, folder, readers)
        count[outcome if outcome in count else "silent"] += 1
        lines.append(f"| {row.source} | {_plain(row.what)} | {outcome}{_brief(words, folder)} | {_number(row)} |")
    told = f"{len(rows)} rows: {count['read']} read, {count['refused']} refused, silent {count['silent']}."
    head = f"{HEADING}\n\n{told}\n\n| form of | row | here | case |\n|---|---|---|---|\n"
    return head + "\n".join(lines) + "\n"


def _brief(words: str, folder: Path) -> str:
    reason = re.sub(r"^dataset 'rows'(, (line|row) 1 of \S+)?: ", "", words.replace(str(folder), "…"))
    shown = reason if len(reason) <= _SHOWN else f"{reason[:_SHOWN].rsplit(' ', 1)[0]} …"
    return f": {_plain(shown)}" if words else ""


def _plain(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "\\<").replace("\n", " ")


def _number(row: Row) -> str:
    return row.case.split("_")[1] if row.case.startswith("case_") else "Parquet"
