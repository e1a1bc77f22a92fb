"""The scripts that write pages."""

import json
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
from PIL import Image

from dhp.config.command_line import compose_config
from dhp.config.keys import field_docs, schema_keys, type_words
from dhp.config.schema import PartConfig
from dhp.data.read.annotations import read_annotations
from dhp.observe.metrics import StepMetrics
from scripts import reference
from scripts.captions import QUESTION, choose_column, main, of_coco, of_laion
from scripts.families import PAGE, page, read_found

COCO = {
    "images": [{"id": 7, "file_name": "000007.jpg"}, {"id": 9, "file_name": "000009.jpg"}],
    "annotations": [
        {"image_id": 9, "id": 1, "caption": "A red wall.\n"},
        {"image_id": 7, "id": 2, "caption": "A blue door."},
        {"image_id": 9, "id": 3, "caption": "The wall is red."},
        {"image_id": 7, "id": 4, "caption": "  "},
    ],
}


def told(rows) -> list[tuple[str, str]]:
    assert all(row["conversations"][0] == {"from": "human", "value": f"<image>\n{QUESTION}"} for row in rows)
    return [(row["image"], row["conversations"][1]["value"]) for row in rows]


def test_coco_has_a_row_a_caption_or_an_image() -> None:
    every, first = (told(list(of_coco(COCO, one, QUESTION))) for one in (False, True))
    assert first == [("000009.jpg", "A red wall."), ("000007.jpg", "A blue door.")]
    assert every == [*first, ("000009.jpg", "The wall is red.")]


def test_lines_without_image_or_caption_are_left_out() -> None:
    lines = [{"url": "https://a/1.jpg", "text": " A dog. "}, {"url": None, "text": "b"}, {"url": "c", "text": " "}]
    assert told(list(of_laion(lines, "url", "text", QUESTION))) == [("https://a/1.jpg", "A dog.")]


def test_of_fetched_images_those_that_were() -> None:
    lines = [
        {"key": "000010023", "caption": "A dog.", "status": "success"},
        {"key": "000010024", "caption": "b", "status": "failed_to_download"},
    ]
    assert told(list(of_laion(lines, "key", "caption", QUESTION))) == [("00001/000010023.jpg", "A dog.")]


def test_columns_by_their_usual_names() -> None:
    assert choose_column(["url", "alt_txt", "cogvlm_caption"], ("cogvlm_caption", "alt_txt"), None) == "cogvlm_caption"
    assert choose_column(["url", "alt_txt"], ("url",), "alt_txt") == "alt_txt"
    with pytest.raises(SystemExit, match="none of the columns a, b is url or URL"):
        choose_column(["a", "b"], ("url", "URL"), None)


def test_what_is_written_is_what_the_registry_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    registry = compose_config("tiny", overrides=["+data=captions"]).data.data_registry
    assert {"coco_captions", "laion_pop"} <= set(registry)
    (tmp_path / "captions.json").write_text(json.dumps(COCO))
    main(["coco", str(tmp_path / "captions.json"), str(tmp_path / "new" / "rows.jsonl")])
    assert capsys.readouterr().out == f"3 rows are in {tmp_path / 'new' / 'rows.jsonl'}\n"
    for name in ("000007.jpg", "000009.jpg"):
        Image.new("RGB", (56, 56)).save(tmp_path / name)
    entry = registry["coco_captions"]
    rows = read_annotations("coco", tmp_path / "new" / "rows.jsonl", tmp_path, entry.format)
    assert len(rows) == 3 and rows.record(0).images == (tmp_path / "000009.jpg",)


def test_parquet_of_addresses(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {"url": ["https://a/1.jpg", None], "llava_caption": ["x", "y"], "cogvlm_caption": ["A dog.", "b"]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "pop.parquet")
    main(["laion", str(tmp_path), str(tmp_path / "rows.jsonl"), "--question", "What is there?"])
    (row,) = map(json.loads, (tmp_path / "rows.jsonl").read_text().splitlines())
    assert row["image"] == "https://a/1.jpg" and row["conversations"][1]["value"] == "A dog."
    assert row["conversations"][0]["value"] == "<image>\nWhat is there?"


def test_the_page_is_made_of_what_was_found() -> None:
    known = read_found()
    assert PAGE.read_text() == page(known, sorted(known)), "run `python -m scripts.families --page`"


def test_memory_of_one_machine_is_told_as_such() -> None:
    why = "its tiny model could not be trained: RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to "
    found = {
        "name": "large",
        "trainable": False,
        "refused": {"family": why + "allocate 1610612736 bytes. Error code 12"},
    }
    told = page({"large": found}, ["large"])
    assert (
        "- `large`: its small model asked for 1.5 GiB at once, and the process that examined it may take 12 GiB" in told
    )
    assert "could not be trained" not in told


WRITE = "run `python -m scripts.reference`"


def reference_page(name: str) -> str:
    return (reference.DOCS / name).read_text(encoding="utf-8")


def test_the_documents_hold_the_tables() -> None:
    for name, heading, tables in (
        ("configuration.md", reference.KEYS_HEADING, reference.key_tables()),
        ("coming-from.md", reference.KEYS_HEADING, reference.foreign_tables()),
        ("metrics.md", reference.FIELDS_HEADING, reference.field_tables()),
    ):
        assert reference_page(name)[reference_page(name).index(heading) :] == tables, WRITE
    assert reference.alias_table() in reference_page("coming-from.md"), WRITE


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
