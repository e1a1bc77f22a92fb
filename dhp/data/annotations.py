"""The annotations of one dataset: its rows, the format that they are in, and where their images are."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dhp.base.errors import DataError, DhpError
from dhp.data.files.open import open_rows
from dhp.data.files.rows import RawSample, RawSamples
from dhp.data.formats.columns import check_columns, renamed
from dhp.data.media.resolver import MediaResolver
from dhp.data.parse import detect, parse_record
from dhp.data.records import Record, located

AUTO = "auto"
_PROBED_SAMPLES = 100  # samples whose keys may tell the format


@dataclass(frozen=True)
class Annotations:
    """One dataset.

    form: a name of `dhp.data.parse.FORMATS`. data_path: where image paths start; None: no files. path: the file, or the
    folder of shards. columns: our names of keys → the samples'."""

    dataset: str
    rows: RawSamples
    form: str
    data_path: Path | None
    allow_http: bool
    path: Path
    columns: Mapping[str, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    def where(self, index: int) -> str:
        """The place of one sample in words, as errors name it. index: 0-based."""
        return f"dataset {self.dataset!r}, {self.rows.locate(index)[1]}"

    def record(self, index: int) -> Record:
        """Parse one sample. index: 0-based. DataError (with its place) if this sample is defective."""
        position, _ = self.rows.locate(index)
        where = self.where(index)
        with located(where):
            entry = _read(self.rows, index)
            media = MediaResolver(self.data_path, self.allow_http, entry.members)
            raw = renamed(entry.value, self.columns)
            try:
                return parse_record(raw, self.dataset, position, where, self.form, media)
            except RecursionError as error:
                raise DataError("it is nested too deep") from error


def read_annotations(
    dataset: str,
    path: Path,
    data_path: Path | None,
    form: str = AUTO,
    allow_http: bool = False,
    columns: Mapping[str, str] = MappingProxyType({}),
) -> Annotations:
    """Open the annotations of a dataset: a file, or a folder of shards.

    form: a name of `dhp.data.parse.FORMATS`, or auto. columns: our names of keys → the samples'.

    Raises DataError where the whole dataset is useless: the file is missing, unreadable or no JSON array (with line and
    column), it has no sample, none of the first samples can be read, none has a key of `columns`, or data_path is not a
    folder. Annotations.record raises for the defects of single samples, so that they can be skipped.
    """
    with located(f"dataset {dataset!r}"):
        if data_path is not None and not os.path.isdir(data_path):  # Path's own raises for names that are too long
            raise DataError(
                f"data_path {data_path} is not a folder. Set it to the folder that the image paths are relative to."
            )
        if not os.path.exists(path):
            raise DataError(
                f"annotation file {path} does not exist. Correct data.data_registry.{dataset}.annotation_path."
            )
        rows = open_rows(path)
        if not len(rows):
            raise DataError(f"{path} holds no sample. Remove the dataset or fill the file.")
        raw = list(_first_samples(rows))
        check_columns(raw, columns)
        form = detect(renamed(one, columns) for one in raw) if form == AUTO else form
        return Annotations(dataset, rows, form, data_path, allow_http, path, dict(columns))


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
            failed = failed or DataError(f"{rows.locate(index)[1]}: {error}")
            continue
        found = True
        yield value
    if failed is not None and not found:
        raise failed
