"""Samples of a run as small pictures with question and answer, read from the files that the run was trained on."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any

from dhp.core.addresses import is_remote
from dhp.core.errors import DataError
from dhp.core.text import harmless
from dhp.data.media.images import open_image
from dhp.data.media.sources import Video, files_of
from dhp.data.read.annotations import Annotations, read_annotations
from dhp.data.read.records import ANSWERS, Record

SIDE = 96  # pixels of the longer side
MOST_PICTURES = 3  # of a sample
MOST_TEXT = 160  # characters of a question or an answer
MOST_BYTES = 1_000_000  # of all pictures of a page
MOST_S = 10.0  # that drawing takes: files may be on a slow disk, and a run's end waits for the page
MOST_ANNOTATIONS = 256 * 2**20  # bytes of a file: opening a larger one would hold up the end of a run
_REGISTRY = "data.data_registry."


class Gallery:
    """Draws samples while there is room on the page. What cannot be read any more, or lies behind an address, is left
    out."""

    def __init__(self, config: Mapping[str, Any]):
        """config: of the run, by dotted key."""
        self._config, self._room, self._until = config, MOST_BYTES, time.monotonic() + MOST_S
        self._opened: dict[str, Annotations | None] = {}

    def sample(self, dataset: str, row: int) -> str:
        """HTML about a sample: its pictures, what is asked and what is answered. row: from 0. "": nothing is known."""
        record = self._record(dataset, row)
        if record is None:
            return ""
        texts = (_text(record, answers) for answers in (False, True))
        asked, answered = (escape(harmless(text)) for text in texts)
        return f'<div class="sample">{self._images(record)}<span>{asked}<br><b>{answered}</b></span></div>'

    def images(self, dataset: str, row: int) -> str:
        """HTML of its pictures alone."""
        record = self._record(dataset, row)
        return "" if record is None else self._images(record)

    def _record(self, dataset: str, row: int) -> Record | None:
        if dataset not in self._opened:
            self._opened[dataset] = self._open(dataset)
        annotations = self._opened[dataset]
        try:
            return None if annotations is None or row >= len(annotations) else annotations.record(row)
        except (DataError, OSError):
            return None

    def _open(self, dataset: str) -> Annotations | None:
        prefix = f"{_REGISTRY}{dataset}."
        entry = {key[len(prefix) :]: value for key, value in self._config.items() if key.startswith(prefix)}
        path, folder = str(entry.get("annotation_path") or ""), str(entry.get("data_path") or "")
        # A folder's shards are read through to be counted.
        if not path or is_remote(path) or is_remote(folder) or not Path(path).is_file():
            return None
        if Path(path).stat().st_size > MOST_ANNOTATIONS:
            return None
        columns = {key.partition(".")[2]: str(value) for key, value in entry.items() if key.startswith("columns.")}
        root = Path(folder) if folder else None
        try:
            return read_annotations(dataset, Path(path), root, str(entry.get("format", "auto")), False, columns)
        except (DataError, OSError):
            return None

    def _images(self, record: Record) -> str:
        found = [part for part in record.media if not isinstance(part, Video)]
        drawn = "".join(self._image(files_of(part)[0]) for part in found[:MOST_PICTURES])
        return drawn + (f"<i>and {len(record.media) - MOST_PICTURES} more</i>" if len(found) > MOST_PICTURES else "")

    def _image(self, file: Any) -> str:
        if self._room <= 0 or time.monotonic() > self._until:
            return ""
        try:
            image = open_image(file)
        except (DataError, OSError):
            return "<i>a picture that cannot be read</i>"
        image.thumbnail((SIDE, SIDE))
        buffer = io.BytesIO()
        image.save(buffer, "JPEG", quality=80)
        address = f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"
        self._room -= len(address)
        return f'<img src="{address}" width="{image.width}" height="{image.height}" alt="">'


def _text(record: Record, answers: bool) -> str:
    parts = [
        part
        for turn in record.turns
        if (turn.role == ANSWERS) == answers
        for part in turn.parts
        if isinstance(part, str)
    ]
    text = " ".join(" ".join(parts).split())
    return text if len(text) <= MOST_TEXT else text[:MOST_TEXT] + " …"
