"""CSV and TSV with a line of names: a row a sample, read whole."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

from dhp.base.errors import DataError
from dhp.data.files.decode import check_head
from dhp.data.files.rows import RawSample
from dhp.data.records import located

# Cells that may hold a list, as JSON. Any other text that begins with a bracket is a text.
_LISTS = ("messages", "conversations", "conversation", "texts", "history")
_FILES = ("image", "images", "video", "videos", "audio", "audios")


class CsvRows:
    """See `dhp.data.files.rows.RawSamples`. An empty cell is null; a list in a cell is JSON."""

    def __init__(self, path: Path) -> None:
        """Raises DataError for a file that is not text in UTF-8 or has rows of other lengths than its line of names."""
        self._path = path
        with located(str(path)):
            with path.open("rb") as file:
                check_head(file.read(4))
            try:
                self._rows = _read(path)
            except UnicodeDecodeError as error:
                raise DataError(f"the file is not UTF-8 (byte {error.start}). Save it as UTF-8") from error
            except csv.Error as error:
                raise DataError(f"the file is no CSV: {error}. Write it as JSONL") from error

    def __len__(self) -> int:
        return len(self._rows)

    def locate(self, index: int) -> tuple[int, str]:
        line = self._rows[index][0]
        return line, f"the row that ends at line {line} of {self._path}"

    def read(self, index: int) -> RawSample:
        _, cells = self._rows[index]
        return RawSample({name: _value(name, cell) for name, cell in cells.items() if cell})


def _read(path: Path) -> list[tuple[int, dict[str, str]]]:
    """Each row with the line that it ends at."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",", strict=True)
        names = next(reader, [])
        if not names or len(set(names)) < len(names) or not all(names):
            raise DataError(f"the first line must name the columns, each once; it has {names!r:.200}")
        rows = []
        for cells in reader:
            if not cells:
                continue
            if len(cells) != len(names):
                raise DataError(f"line {reader.line_num} has {len(cells)} cells, and the first line names {len(names)}")
            rows.append((reader.line_num, dict(zip(names, cells, strict=True))))
    return rows


def _value(name: str, cell: str) -> Any:
    lists = name in _LISTS or (name in _FILES and cell.startswith("["))
    if not lists:
        return cell
    try:
        return json.loads(cell)
    except (ValueError, RecursionError) as error:
        raise DataError(f"the cell of {name!r} must be a list in JSON: {error}") from error
