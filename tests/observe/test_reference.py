"""docs/reference/metrics.md says of each field of a run's files what it means, its unit, and when it is null."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from dhp.observe.metrics import StepMetrics
from dhp.observe.reference import HEADING, TABLES, field_meaning, reference

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "reference" / "metrics.md"


def test_the_document_holds_the_tables_as_the_dataclasses_have_them() -> None:
    written = DOCUMENT.read_text(encoding="utf-8")
    assert written[written.index(HEADING) :] == reference(), "run `python -m dhp.observe.reference` and paste it"


def test_every_field_has_a_row() -> None:
    rows = {line.split("|")[1].strip() for line in reference().splitlines() if line.startswith("| `")}
    assert rows == {f"`{field.name}`" for of in TABLES.values() for field in fields(of)}


def test_meaning_unit_and_null() -> None:
    assert field_meaning(StepMetrics, "tokens_per_s") == ("tokens / step_s.", "tokens a second", "")
    assert field_meaning(StepMetrics, "memory_bytes")[1:] == ("bytes", "on CPUs")


@dataclass
class Vague:
    """Has a field that says too little."""

    speed: float
    """How fast it is."""


def test_a_field_without_a_unit_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"Vague\.speed has no .* but: How fast it is\."):
        field_meaning(Vague, "speed")
