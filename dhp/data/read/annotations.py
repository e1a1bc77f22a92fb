"""The annotations of one dataset: its rows, their format, each as a record."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dhp.core.errors import DataError, DhpError
from dhp.data.media.resolver import MediaResolver
from dhp.data.read.fields import Fields, check_left, check_paired
from dhp.data.read.files import RawSample, RawSamples
from dhp.data.read.formats import (
    check_columns,
    is_pair,
    read_alpaca,
    read_llava,
    read_openai,
    read_sharegpt,
    read_swift,
    read_text,
    read_unknown,
    renamed,
)
from dhp.data.read.open import open_rows
from dhp.data.read.records import Record, Turn, located
from dhp.data.remote.files import RemoteFolder
from dhp.data.remote.places import Place

FORMATS: dict[str, Callable[[Fields, MediaResolver], tuple[Turn, ...]]] = {
    "llava": read_llava,
    "sharegpt": read_sharegpt,
    "openai": read_openai,
    "alpaca": read_alpaca,
    "swift": read_swift,
    "text": read_text,
    "unknown": read_unknown,  # what `detect` could not tell
}
_FILES = ("image", "video", "audio")


def parse_record(raw: Any, dataset: str, position: int, where: str, form: str, media: MediaResolver) -> Record:
    """Check one raw annotation and resolve its images, videos and sounds. form: one of FORMATS.

    DataError, with the reason alone, when keys or types are wrong, roles do not alternate, the last turn is not an
    answer, tags and images differ in number, a file may not be read, or a key that changes what is learned is not read.
    """
    if not isinstance(raw, Mapping):
        raise DataError(f"expected an object with 'conversations' or 'messages', got {type(raw).__name__}")
    check_paired(raw)
    row = Fields(raw)
    turns = FORMATS[form](row, media)
    for number, turn in enumerate(turns, start=1):
        _check_text(number, turn)
    shows = any(not isinstance(part, str) for turn in turns for part in turn.parts)
    return Record(dataset, position, where, turns, check_left(row, shows))


def detect(samples: Iterable[Any]) -> str:
    """The format of a dataset, by the first sample whose keys fit one format alone, else by the key of its turns.

    unknown where no sample fits: each sample then lists what is known.
    """
    fallback = None
    for raw in samples:
        certain, likely = _recognise(raw)
        if certain:
            return certain
        fallback = fallback or likely
    return fallback or "unknown"


def _check_text(number: int, turn: Turn) -> None:
    """JSON can hold one half of a character that UTF-16 writes as two; no tokenizer takes it."""
    try:
        "".join((turn.thoughts, *(part for part in turn.parts if isinstance(part, str)))).encode()
    except UnicodeEncodeError as error:
        raise DataError(f"turn {number}: the text holds half a character ({error.reason}). Write it anew") from error


def _recognise(raw: Any) -> tuple[str | None, str | None]:
    """(what a sample must be, what it may be): text alone looks alike in two formats."""
    if not isinstance(raw, Mapping):
        return None, None
    row = Fields(raw)
    singular, plural = row.has(*_FILES), row.has(*(f"{kind}s" for kind in _FILES))
    if row.has("messages"):
        return _of_messages(raw, singular, plural)
    if "conversations" in raw:
        if plural:
            return "sharegpt", None
        return ("llava", None) if singular else (None, "llava")
    if row.has("instruction") and row.has("output"):
        return "alpaca", None
    if row.has("response", "conversation", "texts") or is_pair(row):
        return "swift", None
    return (None, "sharegpt") if "messages" in raw else (None, None)


def _of_messages(raw: Mapping[str, Any], singular: bool, plural: bool) -> tuple[str | None, str | None]:
    messages = raw["messages"] if isinstance(raw["messages"], list) else []
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    if any(isinstance(content, list) for content in contents):
        return "openai", None
    tagged = any(f"<{kind}>" in content for content in contents if isinstance(content, str) for kind in _FILES)
    if singular or (plural and not tagged):
        return "swift", None
    return ("sharegpt", None) if plural else (None, "sharegpt")


AUTO = "auto"
_PROBED_SAMPLES = 100  # samples whose keys may tell the format


@dataclass(frozen=True)
class Annotations:
    """One dataset.

    form: a name of `FORMATS`. data_path: where image paths start; None: no files. path: the file, or the folder of
    shards. columns: our names of keys → the samples'. keep_newlines: as `dhp.data.media.resolver.MediaResolver`."""

    dataset: str
    rows: RawSamples
    form: str
    data_path: Path | RemoteFolder | None
    allow_http: bool
    path: Place
    columns: Mapping[str, str] = field(default_factory=dict)
    keep_newlines: bool = False

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, index: int) -> str:
        """The place of one sample in words, as errors name it. index: 0-based."""
        return f"dataset {self.dataset!r}, {self.rows.locate(index)}"

    def record(self, index: int) -> Record:
        """Parse one sample. index: 0-based. DataError (with its place) if this sample is defective."""
        where = self.where(index)
        with located(where):
            entry = _read(self.rows, index)
            media = MediaResolver(self.data_path, self.allow_http, entry.members, self.keep_newlines)
            raw = renamed(entry.value, self.columns)
            try:
                return parse_record(raw, self.dataset, index + 1, where, self.form, media)
            except RecursionError as error:
                raise DataError("it is nested too deep") from error


def read_annotations(
    dataset: str,
    path: Place,
    data_path: Path | RemoteFolder | None,
    form: str = AUTO,
    allow_http: bool = False,
    columns: Mapping[str, str] = MappingProxyType({}),
    keep_newlines: bool = False,
) -> Annotations:
    """Open the annotations of a dataset: a file, or a folder of shards.

    form: a name of `dhp.data.read.annotations.FORMATS`, or auto. columns: our names of keys → the samples'.
    keep_newlines: as `Annotations`.

    Raises DataError where the whole dataset is useless: the file is missing, unreadable or no JSON array (with line and
    column), it has no sample, none of the first samples can be read, none has a key of `columns`, or data_path is not a
    folder. Annotations.record raises for the defects of single samples, so that they can be skipped.
    """
    with located(f"dataset {dataset!r}"):
        if isinstance(data_path, Path) and not os.path.isdir(
            data_path
        ):  # Path's own raises for names that are too long
            raise DataError(
                f"data_path {data_path} is not a folder. Set it to the folder that the image paths are relative to."
            )
        if isinstance(path, Path) and not os.path.exists(path):
            raise DataError(
                f"annotation file {path} does not exist. Correct data.data_registry.{dataset}.annotation_path."
            )
        rows = open_rows(path)
        if not len(rows):
            raise DataError(f"{path} holds no sample. Remove the dataset or fill the file.")
        raw = list(_first_samples(rows))
        check_columns(raw, columns)
        form = detect(renamed(one, columns) for one in raw) if form == AUTO else form
        return Annotations(dataset, rows, form, data_path, allow_http, path, dict(columns), keep_newlines)


def _read(rows: RawSamples, index: int) -> RawSample:
    """One raw sample. Damaged files lead the libraries that read them to raise anything; all of it means that this
    sample cannot be used."""
    try:
        return rows.read(index)
    except (DhpError, MemoryError):
        raise
    except Exception as error:
        raise DataError(f"cannot be read: {error or type(error).__name__}") from error


def _first_samples(rows: RawSamples) -> Iterator[Any]:
    """The first samples, without unreadable ones. Raises DataError if none can be read."""
    failed = None
    found = False
    for index in range(min(len(rows), _PROBED_SAMPLES)):
        try:
            value = _read(rows, index).value
        except DataError as error:
            failed = failed or DataError(f"{rows.locate(index)}: {error}")
            continue
        found = True
        yield value
    if failed is not None and not found:
        raise failed
