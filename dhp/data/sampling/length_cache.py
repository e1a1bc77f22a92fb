"""Lengths of all samples of a dataset: measured from headers, a range of rows at a time, and cached on disk."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dhp.core.errors import ConfigError, DataError
from dhp.core.files import replaced, require_writable
from dhp.data.read.annotations import Annotations
from dhp.data.remote.files import RemoteFile
from dhp.data.remote.places import Place, Shards
from dhp.data.sample.lengths import LENGTH_COLUMNS
from dhp.data.sample.preprocess import Preprocessor

CACHE_FORMAT = 4  # of the cache and of what is measured: raise it when either changes


@dataclass(frozen=True, eq=False)
class Lengths:
    """Lengths of rows of one dataset.

    columns: LENGTH_COLUMNS [samples], each a `dhp.data.sample.lengths.Length`; all 0 where the sample is defective.
    defects: by index in these, what is wrong and where.
    """

    columns: np.ndarray
    defects: Mapping[int, str]

    def __len__(self) -> int:
        return len(self.columns)


def measure_lengths(annotations: Annotations, preprocess: Preprocessor, rows: Sequence[int] | np.ndarray) -> Lengths:
    """Lengths of these rows (0-based) of a dataset, in the order of `rows`.

    A defective sample is noted and raises nothing. One whose pixels are damaged counts as good: only decoding it tells.
    """
    columns = np.zeros(len(rows), LENGTH_COLUMNS)
    defects = {}
    for index, row in enumerate(rows):
        try:
            columns[index] = preprocess.measure(annotations.record(int(row)))
        except DataError as error:
            defects[index] = str(error)
    return Lengths(columns, defects)


class LengthCache:
    """A folder with one file for each key. Several processes may use it at once: a file appears whole or not at all."""

    def __init__(self, folder: Path) -> None:
        """folder: made when something is saved."""
        self._folder = folder

    def load(self, key: str) -> Lengths | None:
        """The lengths under a key (`key_of`); None where there are none, or the file is damaged."""
        try:
            with self._path(key).open("rb") as file, np.load(file, allow_pickle=False) as archive:
                # Checked as a whole: a reader that stops early, misled by a damaged head, would not see the checksum.
                return _unpack(archive) if archive.zip.testzip() is None else None
        # Damaged bytes lead zip and NumPy to raise anything, and measuring again is the answer to all of it.
        except Exception:
            return None

    def save(self, key: str, lengths: Lengths) -> None:
        """Write lengths under a key. Raises ConfigError when the folder cannot be written to."""
        with self._writing(), replaced(self._path(key)) as unfinished:
            defects = json.dumps({str(row): message for row, message in lengths.defects.items()}).encode()
            with unfinished.open("wb") as file:
                np.savez(file, columns=lengths.columns, defects=np.frombuffer(defects, dtype=np.uint8))

    def check(self) -> None:
        """Raises ConfigError when the folder cannot be written to, before anything is measured."""
        with self._writing():
            require_writable(self._folder)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.npz"

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Raises ConfigError for an OSError of the block."""
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"lengths of samples cannot be kept in {self._folder}: {error.strerror or error}. Set data.cache_dir "
                "to a folder that can be written to and has room"
            ) from error


def key_of(annotations: Annotations, preprocess: Preprocessor, path: Place) -> str:
    """Hex digest of all that the lengths of a dataset depend on: of its annotations, as files (name, size, time of the
    last change) and as read, and of the preprocessor. path: the annotation file, or the folder of shards.

    Not noticed: images and videos outside of `path` that are replaced, removed or added, in place. Remove the cache's
    files after such a change.
    """
    path, data_path = Path(os.path.abspath(path)) if isinstance(path, Path) else path, annotations.data_path
    about = {
        "format": CACHE_FORMAT,
        "dataset": annotations.dataset,  # messages name it
        "path": str(path),
        "form": annotations.form,
        **({"columns": dict(annotations.columns)} if annotations.columns else {}),
        "data_path": os.path.abspath(data_path) if isinstance(data_path, Path) else data_path and str(data_path),
        "allow_http": annotations.allow_http,
        "preprocess": preprocess.fingerprint(),
    }
    digest = hashlib.sha256(json.dumps(about).encode())
    for stamp in _stamps(path):
        digest.update(json.dumps(stamp).encode())
    return digest.hexdigest()


def _stamps(path: Place) -> Iterator[tuple[str, int | None, int | str]]:
    """Name, bytes and time of the last change (ns) of a file, or of each file of a folder, in a fixed order. Behind an
    address, what its file system says of the last change."""
    if isinstance(path, Shards):
        for file in path.files:
            if isinstance(file, RemoteFile):
                yield file.url, file.about().size, file.about().tag
            else:
                yield _stamp(file)
        return
    if not path.is_dir():
        yield _stamp(path)
    for folder, subfolders, names in os.walk(path):
        subfolders.sort()
        for name in sorted(names):
            yield _stamp(Path(folder, name))


def _stamp(path: Path) -> tuple[str, int, int]:
    try:
        about = path.stat()
    except OSError:  # a link to nothing
        return str(path), -1, -1
    return str(path), about.st_size, about.st_mtime_ns


def _unpack(archive: Mapping[str, Any]) -> Lengths | None:
    columns = archive["columns"]
    if columns.dtype != LENGTH_COLUMNS or columns.ndim != 1:
        return None
    defects = json.loads(archive["defects"].tobytes())
    return Lengths(columns, {int(row): message for row, message in defects.items()})
