"""Annotation files: a JSON array, or JSONL with one object a line, read whole and kept unparsed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dhp.data.records import Record, located, parse_record
from dhp.errors import DataError


@dataclass(frozen=True)
class AnnotationFile:
    """The annotations of one dataset, each with the position a person would look it up by.

    entries: (position, raw JSON value); the position is a 1-based line (JSONL) or array element (JSON).
    """

    dataset: str
    path: Path
    data_path: Path | None  # folder that image paths are relative to; None: text only
    unit: str  # what a position counts: "line" or "element"
    entries: tuple[tuple[int, Any], ...]

    def __len__(self) -> int:
        return len(self.entries)

    def where(self, index: int) -> str:
        """The place of one entry in words, as errors name it. index: 0-based."""
        return f"dataset {self.dataset!r}, {self.unit} {self.entries[index][0]} of {self.path}"

    def record(self, index: int) -> Record:
        """Parse one entry. index: 0-based. DataError (with its place) if this entry is defective."""
        position, raw = self.entries[index]
        where = self.where(index)
        with located(where):
            return parse_record(raw, self.dataset, position, where, self.data_path)


def read_annotations(dataset: str, path: Path, data_path: Path | None) -> AnnotationFile:
    """Read a whole annotation file; `.jsonl` means one object a line, anything else one JSON array.

    Raises DataError for what spoils the file as a whole: it is missing, not UTF-8, not JSON (with line
    and column), not an array, or empty; or data_path is not a folder. Defects of single entries are
    left for AnnotationFile.record, so that they can be skipped.
    """
    if data_path is not None and not data_path.is_dir():
        raise DataError(
            f"dataset {dataset!r}: data_path {data_path} is not a folder. "
            "Set it to the folder that the image paths are relative to."
        )
    content = _content(dataset, path)
    lines = path.suffix.lower() == ".jsonl"
    entries = _lines(dataset, path, content) if lines else _array(dataset, path, content)
    if not entries:
        raise DataError(f"dataset {dataset!r}: {path} holds no sample. Remove the dataset or fill the file.")
    return AnnotationFile(dataset, path, data_path, "line" if lines else "element", tuple(entries))


def _content(dataset: str, path: Path) -> bytes:
    try:
        return path.read_bytes().removeprefix(b"\xef\xbb\xbf")  # a byte order mark is not JSON
    except FileNotFoundError:
        raise DataError(
            f"dataset {dataset!r}: annotation file {path} does not exist. "
            f"Correct data.data_registry.{dataset}.annotation_path."
        ) from None
    except OSError as error:
        raise DataError(f"dataset {dataset!r}: cannot read annotation file {path}: {error.strerror}") from error


def _lines(dataset: str, path: Path, content: bytes) -> list[tuple[int, Any]]:
    # Split on "\n" alone: str.splitlines would also cut inside strings that hold U+2028.
    numbered = enumerate(content.split(b"\n"), start=1)
    return [(number, _value(dataset, path, line, number)) for number, line in numbered if line.strip()]


def _array(dataset: str, path: Path, content: bytes) -> list[tuple[int, Any]]:
    value = _value(dataset, path, content, 1)
    if not isinstance(value, list):
        raise DataError(
            f"dataset {dataset!r}: {path} holds one JSON {_kind(value)}, not an array of samples. "
            "Wrap the samples in [ ]; a file with one object a line must be called .jsonl."
        )
    return list(enumerate(value, start=1))


def _value(dataset: str, path: Path, content: bytes, first_line: int) -> Any:
    """The JSON value in `content`, which begins at line `first_line` of the file."""
    try:
        return json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        line = first_line + content.count(b"\n", 0, error.start)
        reason = f"line {line} is not UTF-8 (byte 0x{content[error.start]:02x}). Save the file as UTF-8"
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        reason = f"malformed JSON at line {line}, column {error.colno}: {error.msg}"
        if path.suffix.lower() != ".jsonl" and error.msg == "Extra data":
            reason += ". One object a line is JSONL: call the file .jsonl"
    except (RecursionError, ValueError) as error:  # nesting too deep, or a number with too many digits
        reason = f"JSON from line {first_line} on cannot be read: {error}"
    raise DataError(f"dataset {dataset!r}: {path}: {reason}.")


def _kind(value: Any) -> str:
    return {dict: "object", str: "string", bool: "boolean", type(None): "null"}.get(type(value), "number")
