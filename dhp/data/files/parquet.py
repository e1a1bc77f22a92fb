"""Parquet files: a row a sample, read by row groups."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from dhp.base.errors import ConfigError, DataError
from dhp.data.files.rows import RawSample

_KEPT_GROUPS = 2  # row groups in memory


class ParquetRows:
    """See `dhp.data.files.rows.RawSamples`. The last two row groups stay in memory."""

    def __init__(self, paths: Sequence[Path]) -> None:
        """Raises ConfigError without pyarrow, DataError for a file that is not Parquet."""
        self._paths = tuple(paths)
        groups = [(n, group, rows) for n, path in enumerate(paths) for group, rows in enumerate(_group_sizes(path))]
        self._groups = [(n, group) for n, group, _ in groups]
        self._ends = np.cumsum([rows for _, _, rows in groups], dtype=np.int64)
        sizes = [sum(rows for n, _, rows in groups if n == file) for file in range(len(paths))]
        self._file_starts = np.cumsum([0, *sizes[:-1]])
        self._lock = threading.Lock()  # or two threads read the same row group at once
        self._table = lru_cache(maxsize=_KEPT_GROUPS)(self._read_group)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def locate(self, index: int) -> tuple[int, str]:
        file, _ = self._groups[self._group(index)]
        row = index - int(self._file_starts[file]) + 1
        return row, f"row {row} of {self._paths[file]}"

    def read(self, index: int) -> RawSample:
        group = self._group(index)
        with self._lock:
            table = self._table(group)
        row = index - int(self._ends[group]) + table.num_rows
        return RawSample(table.slice(row, 1).to_pylist()[0])

    def _group(self, index: int) -> int:
        return int(np.searchsorted(self._ends, index, side="right"))

    def _read_group(self, group: int) -> Any:
        file, number = self._groups[group]
        parquet = _pyarrow()
        try:
            return parquet.ParquetFile(self._paths[file]).read_row_group(number)
        except Exception as error:  # pyarrow's own errors are of several kinds
            raise DataError(f"row group {number + 1} cannot be read: {error}") from error


def _group_sizes(path: Path) -> list[int]:
    """Rows of each row group."""
    parquet = _pyarrow()
    try:
        about = parquet.ParquetFile(path).metadata
    except Exception as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}. Copy it again") from error
    return [about.row_group(group).num_rows for group in range(about.num_row_groups)]


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError("Parquet files need pyarrow, which is not installed; run `pip install pyarrow`") from error
    return pyarrow.parquet
