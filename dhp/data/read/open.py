"""Opens an annotation file by its kind; Arrow and Parquet."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from dhp.core.errors import ConfigError, DataError, DhpError
from dhp.data.read.files import CsvRows, JsonlRows, JsonRows, RawSample, RawSamples
from dhp.data.read.webdataset import TarRows
from dhp.data.remote.files import RemoteFile, Source, look_up
from dhp.data.remote.places import Place, Shards


class ArrowRows:
    """See `dhp.data.read.files.RawSamples`."""

    def __init__(self, folder: Path) -> None:
        """Raises ConfigError without the datasets package, DataError for a folder that it cannot read."""
        if (folder / "dataset_dict.json").is_file():
            splits = sorted(path.name for path in folder.iterdir() if path.is_dir())
            raise DataError(f"{folder} holds several splits; give the folder of one: {', '.join(splits)}")
        try:
            from datasets import load_from_disk
        except ImportError as error:
            raise ConfigError(
                "a saved Hugging Face dataset needs datasets, which is not installed; run `pip install datasets`"
            ) from error
        try:
            # As arrow, images come as they are stored, bytes and path, and are not decoded here.
            self._table = load_from_disk(str(folder)).with_format("arrow")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{folder}: not a readable Hugging Face dataset: {error}") from error
        self._folder, self._lock = folder, threading.Lock()

    def __len__(self) -> int:
        return len(self._table)

    def locate(self, index: int) -> str:
        return f"row {index + 1} of {self._folder}"

    def read(self, index: int) -> RawSample:
        with self._lock:
            return RawSample(self._table[index : index + 1].to_pylist()[0])


_KEPT_GROUPS = 2  # row groups in memory


class ParquetRows:
    """See `dhp.data.read.files.RawSamples`. The last two row groups stay in memory."""

    def __init__(self, paths: Sequence[Source]) -> None:
        """Raises ConfigError without pyarrow, DataError for a file that is not Parquet."""
        self._paths = tuple(paths)
        groups = [(n, group, rows) for n, path in enumerate(paths) for group, rows in enumerate(_known_sizes(path))]
        self._groups = [(n, group) for n, group, _ in groups]
        self._ends = np.cumsum([rows for _, _, rows in groups], dtype=np.int64)
        sizes = [sum(rows for n, _, rows in groups if n == file) for file in range(len(paths))]
        self._file_starts = np.cumsum([0, *sizes[:-1]])
        self._lock = threading.Lock()  # or two threads read the same row group at once
        self._table = lru_cache(maxsize=_KEPT_GROUPS)(self._read_group)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def locate(self, index: int) -> str:
        file, _ = self._groups[self._group(index)]
        return f"row {index - int(self._file_starts[file]) + 1} of {self._paths[file]}"

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
            with self._paths[file].open("rb") as opened:
                return parquet.ParquetFile(opened).read_row_group(number)
        except Exception as error:  # pyarrow's own errors are of several kinds
            raise DataError(f"row group {number + 1} cannot be read: {error}") from error


def _known_sizes(path: Source) -> list[int]:
    """As `_group_sizes`; of a file behind an address kept, so that it is not fetched for that once more."""
    if not isinstance(path, RemoteFile):
        return _group_sizes(path)
    sizes: list[int] = path.index("row groups", lambda: np.array(_group_sizes(path), dtype=np.int64)).tolist()
    return sizes


def _group_sizes(path: Source) -> list[int]:
    parquet = _pyarrow()
    try:
        with path.open("rb") as opened:
            about = parquet.ParquetFile(opened).metadata
    except DhpError:
        raise
    except Exception as error:
        raise DataError(f"{path}: not a readable Parquet file: {error}. Copy it again") from error
    return [about.row_group(group).num_rows for group in range(about.num_row_groups)]


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError("Parquet files need pyarrow, which is not installed; run `pip install pyarrow`") from error
    return pyarrow.parquet


READ = ".json, .jsonl, .ndjson, .csv, .tsv, .parquet, .tar and folders that datasets' save_to_disk writes"
_UNREAD = (".txt", ".md", ".xlsx", ".xls", ".ods", ".arrow", ".feather", ".pkl", ".pt", ".npy", ".npz", ".yaml", ".yml")
_COMPRESSED = (".gz", ".tgz", ".bz2", ".xz", ".zst", ".zip")


def open_rows(path: Place) -> RawSamples:
    """Open a file, a folder of shards, or shards. Raises DataError for what is missing, unreadable or of no known
    kind."""
    try:
        if isinstance(path, Shards):
            return _open_shards(path)
        return _open_folder(path) if path.is_dir() else _open_file(path)
    except OSError as error:
        raise DataError(f"cannot read annotation file {path}: {error.strerror or error}") from error


def _open_shards(shards: Shards) -> RawSamples:
    kinds = {file.suffix.lower() for file in shards.files}
    look_up(shards.files)
    if len(shards.files) == 1 and kinds.isdisjoint((".parquet", ".tar")):
        return _open_file(shards.files[0])
    if kinds not in ({".parquet"}, {".tar"}):
        raise DataError(
            f"{shards} gives {len(shards.files)} files that end in {', '.join(sorted(kinds)) or 'nothing'}; several "
            "are read where all are .parquet or all .tar. Correct it, or give a dataset for each"
        )
    gone = next((file for file in shards.files if isinstance(file, Path) and not file.is_file()), None)
    if gone is not None:
        raise DataError(f"{shards} names {gone}, which does not exist. Correct the pattern, or copy the file there")
    return ParquetRows(shards.files) if kinds == {".parquet"} else TarRows(shards.files)


def _open_file(path: Source) -> RawSamples:
    ending = path.suffix.lower()
    if ending in _COMPRESSED:
        raise DataError(f"{path} is compressed, and its samples cannot be found one by one. Unpack it")
    if ending == ".parquet":
        return ParquetRows([path])
    if ending == ".tar":
        return TarRows([path])
    if ending in (".csv", ".tsv"):
        return CsvRows(path)
    if ending in _UNREAD:
        raise DataError(f"{path} is a {ending} file, and read are {READ}. Convert it")
    return JsonlRows(path) if ending in (".jsonl", ".ndjson") else JsonRows(path)


def _open_folder(folder: Path) -> RawSamples:
    if (folder / "state.json").is_file() or (folder / "dataset_dict.json").is_file():
        return ArrowRows(folder)
    tables, shards = sorted(folder.rglob("*.parquet")), sorted(folder.rglob("*.tar"))
    if bool(tables) == bool(shards):
        raise DataError(
            f"{folder} is a folder with {len(tables)} .parquet and {len(shards)} .tar files. Give a folder that holds "
            "one kind, a saved Hugging Face dataset, or a single file"
        )
    return ParquetRows(tables) if tables else TarRows(shards)
