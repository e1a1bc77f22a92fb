"""The documents hold the tables that are made from code and data, and every key and field has a meaning."""

from __future__ import annotations

from dataclasses import dataclass, fields

import pytest

from dhp.config.keys import field_docs, schema_keys, type_words
from dhp.config.schema import PartConfig
from dhp.observe.metrics import StepMetrics
from scripts import reference

WRITE = "run `python -m scripts.reference`"


def page(name: str) -> str:
    return (reference.DOCS / name).read_text(encoding="utf-8")


def test_the_documents_hold_the_tables() -> None:
    for name, heading, tables in (
        ("configuration.md", reference.KEYS_HEADING, reference.key_tables()),
        ("coming-from.md", reference.KEYS_HEADING, reference.foreign_tables()),
        ("metrics.md", reference.FIELDS_HEADING, reference.field_tables()),
    ):
        assert page(name)[page(name).index(heading) :] == tables, WRITE
    assert reference.alias_table() in page("coming-from.md"), WRITE


def test_every_key_has_a_meaning() -> None:
    assert [path for path, key in schema_keys().items() if not key.doc] == []


def test_docs_of_several_lines_become_one() -> None:
    told = field_docs(PartConfig)["zero_stage"]
    assert "| 2 gradients too | 3 weights too, gathered module by module." in told


def test_types_in_words() -> None:
    keys = schema_keys()
    assert type_words(keys["training.max_steps"].type) == "a whole number or null"
    assert type_words(keys["training.betas"].type) == "a list such as [0.9, 0.999]"
    assert type_words(keys["training"].type) == "a section of keys"


def test_every_field_has_a_row() -> None:
    rows = {line.split("|")[1].strip() for line in reference.field_tables().splitlines() if line.startswith("| `")}
    assert rows == {f"`{field.name}`" for of in reference.FIELDS.values() for field in fields(of)}


def test_meaning_unit_and_null() -> None:
    assert reference.field_meaning(StepMetrics, "tokens_per_s") == ("tokens / step_s.", "tokens a second", "")
    assert reference.field_meaning(StepMetrics, "memory_bytes")[1:] == ("bytes", "on CPUs")


@dataclass
class Vague:
    """Has a field that says too little."""

    speed: float
    """How fast it is."""


def test_a_field_without_a_unit_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"Vague\.speed has no .* but: How fast it is\."):
        reference.field_meaning(Vague, "speed")
