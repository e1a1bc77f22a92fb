"""A folder that Hugging Face's `Dataset.save_to_disk` wrote: mapped into memory, read row by row."""

from __future__ import annotations

import threading
from pathlib import Path

from dhp.base.errors import ConfigError, DataError
from dhp.data.files.rows import RawSample


class ArrowRows:
    """See `dhp.data.files.rows.RawSamples`."""

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

    def locate(self, index: int) -> tuple[int, str]:
        return index + 1, f"row {index + 1} of {self._folder}"

    def read(self, index: int) -> RawSample:
        with self._lock:
            return RawSample(self._table[index : index + 1].to_pylist()[0])
