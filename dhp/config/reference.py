"""`python -m dhp.config.reference` prints docs/reference/configuration.md's table of all keys, from the schema."""

from dataclasses import is_dataclass
from typing import Any

from dhp.config.keys import Key, default_words, schema_keys, type_words

HEADING = "## All keys"


def reference() -> str:
    """Markdown from `## All keys` on: a table for the top level and for each section, equal sections only once."""
    tables = [f"{HEADING}\n", _table("", [key for key in _leaves("") if "." not in key.path])]
    for sections in _sections():
        title = " and ".join(f"`{section}`" for section in sections)
        tables += [f"### {title}\n", schema_keys()[sections[0]].doc + "\n", _table(sections[0], _leaves(sections[0]))]
    return "\n".join(tables)


def _sections() -> list[list[str]]:
    """Section paths, those of one type (vision and text) together."""
    by_type: dict[Any, list[str]] = {}
    for key in schema_keys().values():
        if key.is_section and is_dataclass(key.type):
            by_type.setdefault(key.type, []).append(key.path)
    return list(by_type.values())


def _leaves(section: str) -> list[Key]:
    keys = [key for key in schema_keys().values() if key.path.rpartition(".")[0] == section]
    return [key for key in keys if not key.is_section]


def _table(section: str, keys: list[Key]) -> str:
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    for key in keys:
        name = key.path.removeprefix(f"{section}.") if section else key.path
        meaning = key.doc.replace("|", chr(92) + "|")
        rows.append(f"| `{name}` | {type_words(key.type)} | {default_words(key)} | {meaning} |")
    return "\n".join(rows) + "\n"


if __name__ == "__main__":
    print(reference(), end="")
