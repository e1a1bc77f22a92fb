"""`python -m dhp.observe.reference` prints docs/reference/metrics.md's tables of fields, from the dataclasses."""

import re
from dataclasses import fields
from typing import get_type_hints

from dhp.config.keys import field_docs
from dhp.observe.metrics import AnswerMetrics, EvalMetrics, StepMetrics
from dhp.observe.summary import Summary
from dhp.observe.trace import TraceEvent

HEADING = "## Fields of metrics.jsonl"
TABLES = {
    HEADING: StepMetrics,
    "## Fields of an evaluation's line": EvalMetrics,
    "## Fields of an answer's line": AnswerMetrics,
    "## Fields of summary.json": Summary,
    "## Fields of trace.json": TraceEvent,
}


def reference() -> str:
    """Markdown: a table for each file, a row for each field, in the order of the file."""
    return "\n".join(f"{heading}\n\n{_table(of)}" for heading, of in TABLES.items())


def field_meaning(of: type, name: str) -> tuple[str, str, str]:
    """Meaning, unit and when it is null (empty: never) of a field, from the string below it.

    Raises ValueError for a field without meaning or unit.
    """
    text = field_docs(of).get(name, "")
    found = re.fullmatch(r"(.+?) Unit: (.+?)\.(?: Null: (.+)\.)?", text)
    if found is None:
        raise ValueError(f"{of.__name__}.{name} has no `meaning. Unit: unit.` below it, but: {text}")
    return found[1], found[2], found[3] or ""


def _table(of: type) -> str:
    hints = get_type_hints(of)
    rows = ["| field | kind | unit | null | meaning |", "|---|---|---|---|---|"]
    for field in fields(of):
        meaning, unit, null = (text.replace("|", r"\|") for text in field_meaning(of, field.name))
        rows.append(f"| `{field.name}` | {_kind(str(hints[field.name]))} | {unit} | {null or '–'} | {meaning} |")
    return "\n".join(rows) + "\n"


def _kind(annotation: str) -> str:
    """`number`, `text` or `object`."""
    if "Mapping" in annotation:
        return "object"
    return "number" if re.search(r"\b(int|float)\b", annotation) else "text"


if __name__ == "__main__":
    print(reference(), end="")
