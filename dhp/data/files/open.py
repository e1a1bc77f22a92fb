"""Opens an annotation file by its kind, found from its name or, for a folder, from its contents."""

from __future__ import annotations

from pathlib import Path

from dhp.base.errors import DataError
from dhp.data.files.arrow import ArrowRows
from dhp.data.files.csv import CsvRows
from dhp.data.files.json import JsonRows
from dhp.data.files.jsonl import JsonlRows
from dhp.data.files.parquet import ParquetRows
from dhp.data.files.rows import RawSamples
from dhp.data.files.tar import TarRows

READ = ".json, .jsonl, .ndjson, .csv, .tsv, .parquet, .tar and folders that datasets' save_to_disk writes"
_UNREAD = (".txt", ".md", ".xlsx", ".xls", ".ods", ".arrow", ".feather", ".pkl", ".pt", ".npy", ".npz", ".yaml", ".yml")
_COMPRESSED = (".gz", ".tgz", ".bz2", ".xz", ".zst", ".zip")


def open_rows(path: Path) -> RawSamples:
    """Open a file or a folder of shards. Raises DataError when it is missing, unreadable or of no known kind."""
    try:
        if path.is_dir():
            return _open_folder(path)
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
    except OSError as error:
        raise DataError(f"cannot read annotation file {path}: {error.strerror or error}") from error


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
