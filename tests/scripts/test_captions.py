"""Converters of captions: which rows there are, and that dhp reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from dhp.config.command_line import compose_config
from dhp.data.read.annotations import read_annotations
from scripts.captions import QUESTION, choose_column, main, of_coco, of_laion

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
