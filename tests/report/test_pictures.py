"""Samples as small pictures, from the files of a run; what cannot be read is left out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from dhp.report import tables
from dhp.report.tables import SIDE, Gallery


def config(tmp_path: Path, **more: str) -> dict[str, str]:
    Image.new("RGB", (400, 200), "red").save(tmp_path / "a.png")
    turns = [{"from": "human", "value": "<image>\nWhat <b> is it?"}, {"from": "gpt", "value": "Red."}]
    rows = [{"image": "a.png", "conversations": turns}, {"image": "gone.png", "conversations": turns}]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    prefix = "data.data_registry.shapes."
    return {
        f"{prefix}annotation_path": str(tmp_path / "a.json"),
        f"{prefix}data_path": str(tmp_path),
        f"{prefix}format": "auto",
        **more,
    }


def test_a_sample_is_its_picture_its_question_and_its_answer(tmp_path: Path) -> None:
    shown = Gallery(config(tmp_path)).sample("shapes", 0)
    assert f'width="{SIDE}" height="{SIDE // 2}"' in shown and "data:image/jpeg;base64," in shown
    assert "What &lt;b&gt; is it?" in shown and "<b>Red.</b>" in shown


def test_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    gallery = Gallery(config(tmp_path))
    assert "a picture that cannot be read" in gallery.sample("shapes", 1)
    assert (gallery.sample("shapes", 2), gallery.sample("other", 0)) == ("", "")


def test_no_address_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "read_annotations", lambda *given: pytest.fail("it was opened"))
    found = config(tmp_path) | {"data.data_registry.shapes.annotation_path": "s3://bucket/a.json"}
    assert Gallery(found).sample("shapes", 0) == ""


def test_pictures_end_where_the_page_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MOST_BYTES", 1)
    gallery = Gallery(config(tmp_path))
    assert "<img" in gallery.images("shapes", 0) and gallery.images("shapes", 0) == ""


def test_large_annotations_are_not_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = config(tmp_path)
    monkeypatch.setattr(tables, "MOST_ANNOTATIONS", 10)
    monkeypatch.setattr(tables, "read_annotations", lambda *given: pytest.fail("it was opened"))
    assert Gallery(found).sample("shapes", 0) == ""
