"""The tables of the documents that are made from code and data; `python -m scripts.reference` writes them in.

Below docs/reference: configuration.md has every key, from the schema; coming-from.md keys of other trainers, from
dhp/config/vocabulary.yaml, and those that are translated; metrics.md the fields of a run's files, from the dataclasses.
What a page has from the heading of its tables on is replaced."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from dhp.config.keys import Key, default_words, field_docs, schema_keys, type_words
from dhp.config.vocabulary import ANY, TRAINERS, Alias, Foreign, shown_value, vocabulary
from dhp.observe.metrics import AnswerMetrics, EvalMetrics, StepMetrics
from dhp.observe.ranks import Event, RankLine
from dhp.observe.summary import Summary
from dhp.observe.trace import TraceEvent

DOCS = Path(__file__).parents[1] / "docs" / "reference"
KEYS_HEADING = "## All keys"  # of configuration.md and of coming-from.md
FIELDS_HEADING = "## Fields of metrics.jsonl"
FIELDS = {
    FIELDS_HEADING: StepMetrics,
    "## Fields of an evaluation's line": EvalMetrics,
    "## Fields of an answer's line": AnswerMetrics,
    "## Fields of ranks.jsonl": RankLine,
    "## Fields of events.jsonl": Event,
    "## Fields of summary.json": Summary,
    "## Fields of trace.json": TraceEvent,
}
ALIAS_COLUMNS = ("there", "here")
_COLUMNS = ("key", "type", "default", "meaning")


def main() -> None:
    """Write the tables of all three pages."""
    _replace("configuration.md", KEYS_HEADING, key_tables())
    _replace("coming-from.md", KEYS_HEADING, foreign_tables())
    _replace("metrics.md", FIELDS_HEADING, field_tables())
    page = DOCS / "coming-from.md"
    text = page.read_text(encoding="utf-8")
    start = text.index(_table(ALIAS_COLUMNS, []))
    page.write_text(text[:start] + alias_table() + "\n" + text[text.index("\n\n", start) + 2 :], encoding="utf-8")


def key_tables() -> str:
    """Markdown from `## All keys` on: a table for the top level and for each section, equal sections only once."""
    by_type: dict[Any, list[str]] = {}
    for key in schema_keys().values():
        if key.is_section and is_dataclass(key.type):
            by_type.setdefault(key.type, []).append(key.path)
    tables = [f"{KEYS_HEADING}\n", _keys_table("")]
    for sections in by_type.values():
        title = " and ".join(f"`{section}`" for section in sections)
        tables += [f"### {title}\n", schema_keys()[sections[0]].doc + "\n", _keys_table(sections[0])]
    advanced = [key for key in schema_keys().values() if key.advanced]
    rows = [
        (f"`{key.path}`", *_key_cells(key)) for key in advanced if key.path.partition(".")[0] not in ("audio", "text")
    ]
    said = (
        "Few runs need these; no configuration that comes with dhp sets one. Those of `vision` are those of every part."
    )
    return "\n".join([*tables, f"### Advanced\n\n{said}\n", _table(_COLUMNS, rows)])


def alias_table() -> str:
    """The keys of another vocabulary that are translated, as a Markdown table."""
    rows = []
    for row in vocabulary().aliases:
        value = "" if row.value is ANY else f"={shown_value(row.value)}"
        rows.append((f"`{row.old}{value}`", _meaning(row)))
    return _table(ALIAS_COLUMNS, rows)


def foreign_tables() -> str:
    """Markdown from `## All keys` on: a table for each topic, that of environment variables last."""
    parts = [f"{KEYS_HEADING}\n"]
    for topic, rows in {**vocabulary().foreign, "Environment variables": vocabulary().environment}.items():
        parts.append(
            f"### {topic}\n\n" + _table(("there", "known from", "here"), [_foreign_cells(row) for row in rows])
        )
    return "\n".join(parts)


def field_tables() -> str:
    """Markdown: a table for each file of a run, a row for each field, in the order of the file."""
    parts = []
    for heading, of in FIELDS.items():
        hints, rows = get_type_hints(of), []
        for field in fields(of):
            meaning, unit, null = (text.replace("|", r"\|") for text in field_meaning(of, field.name))
            rows.append((f"`{field.name}`", _kind(str(hints[field.name])), unit, null or "–", meaning))
        parts.append(f"{heading}\n\n" + _table(("field", "kind", "unit", "null", "meaning"), rows))
    return "\n".join(parts)


def field_meaning(of: type, name: str) -> tuple[str, str, str]:
    """Meaning, unit and when it is null (empty: never) of a field, from the string below it.

    Raises ValueError for a field without meaning or unit."""
    text = field_docs(of).get(name, "")
    found = re.fullmatch(r"(.+?) Unit: (.+?)\.(?: Null: (.+)\.)?", text)
    if found is None:
        raise ValueError(f"{of.__name__}.{name} has no `meaning. Unit: unit.` below it, but: {text}")
    return found[1], found[2], found[3] or ""


def _keys_table(section: str) -> str:
    rows = []
    for key in schema_keys().values():
        if key.path.rpartition(".")[0] == section and not key.is_section and not key.advanced:
            rows.append((f"`{key.path.removeprefix(f'{section}.')}`", *_key_cells(key)))
    return _table(_COLUMNS, rows)


def _key_cells(key: Key) -> tuple[str, str, str]:
    return type_words(key.type), default_words(key), key.doc.replace("|", r"\|")


def _meaning(row: Alias) -> str:
    if row.instead:
        return f"refused; write {row.instead}"
    if not row.new:
        return f"no effect: {row.why}"
    value = "" if row.to is ANY else f"={shown_value(row.to)}"
    times = f", times `{row.times}`" if row.times else ""
    return ", ".join(f"`{new}{value}`" for new in row.new) + times + (f"; {row.why}" if row.why else "")


def _foreign_cells(row: Foreign) -> tuple[str, str, str]:
    theirs = ", ".join(f"`{name}`" for name in row.names)
    here = ", ".join(f"`{key}`" for key in row.keys)
    said = re.sub(r"(?<!`)\b((?:training|data|text|vision|audio|cluster)\.[\w.]+\w(?:=\w+)?)", r"`\1`", row.say)
    answer = here + ("; " if said else "") + said if here else f"– {said}"
    return theirs, ", ".join(TRAINERS[letter] for letter in row.of), answer


def _kind(annotation: str) -> str:
    """`number`, `text` or `object`."""
    if "Mapping" in annotation:
        return "object"
    return "number" if re.search(r"\b(int|float)\b", annotation) else "text"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def _replace(page: str, heading: str, tables: str) -> None:
    file = DOCS / page
    text = file.read_text(encoding="utf-8")
    file.write_text(text[: text.index(heading)] + tables, encoding="utf-8")


if __name__ == "__main__":
    main()
