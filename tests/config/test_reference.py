"""Every key is documented, in the schema and in docs/reference/configuration.md."""

from pathlib import Path

from dhp.config.keys import field_docs, schema_keys, type_words
from dhp.config.part import PartConfig
from dhp.config.reference import HEADING, reference

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "reference" / "configuration.md"


def test_every_key_has_a_meaning():
    assert [path for path, key in schema_keys().items() if not key.doc] == []


def test_the_document_holds_the_reference_as_the_schema_has_it():
    written = DOCUMENT.read_text(encoding="utf-8")
    assert written[written.index(HEADING) :] == reference(), "run `python -m dhp.config.reference` and paste it"


def test_docs_of_several_lines_become_one():
    told = field_docs(PartConfig)["zero_stage"]
    assert "| 2 gradients too | 3 weights too, gathered module by module." in told


def test_types_in_words():
    keys = schema_keys()
    assert type_words(keys["training.max_steps"].type) == "a whole number or null"
    assert type_words(keys["training.betas"].type) == "a list such as [0.9, 0.999]"
    assert type_words(keys["training"].type) == "a section of keys"
