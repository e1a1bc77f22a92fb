"""Measures lengths of all samples from headers; cached on disk."""

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dhp.core.errors import ConfigError, DataError
from dhp.core.files import replaced, require_writable
from dhp.data.balance.packs import Loads
from dhp.data.read.annotations import Annotations
from dhp.data.read.records import located
from dhp.data.remote.places import Place, Shards
from dhp.data.remote.remote_files import RemoteFile
from dhp.data.sample.preprocess import Preprocessor
from dhp.data.sample.sample import LENGTH_COLUMNS
from dhp.data.sampling.dataset import Dataset

CACHE_FORMAT = 5  # of the cache and of what is measured: raise it when either changes


@dataclass(frozen=True, eq=False)
class Lengths:
    """Lengths of rows of one dataset.

    columns: LENGTH_COLUMNS [samples], each a `dhp.data.sample.sample.Length`; all 0 where the sample is defective.
    defects: by index in these, what is wrong and where."""

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
    files after such a change."""
    path, data_path = Path(os.path.abspath(path)) if isinstance(path, Path) else path, annotations.data_path
    about = {
        "format": CACHE_FORMAT,
        "dataset": annotations.dataset,  # messages name it
        "path": str(path),
        "form": annotations.form,
        **({"columns": dict(annotations.columns)} if annotations.columns else {}),
        **({"compares": annotations.compares} if annotations.compares else {}),
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


MEASURED_ROWS = 250  # samples that are measured in one go: a second, or minutes where videos must be counted or fetched
SAVE_S = 30.0  # between two writes while lengths are being measured: what a stopped run may lose
UNKNOWN = -1  # text of a sample that was not measured yet


@dataclass(frozen=True, eq=False)
class RowChunk:
    """Rows of a dataset's annotations, int64, ascending."""

    dataset: str
    rows: np.ndarray


class LengthTable:
    """Lengths of one dataset's samples, as far as they are known; cached on disk, also before all are.

    columns: LENGTH_COLUMNS [samples]; where text is UNKNOWN, the others are 0."""

    def __init__(self, annotations: Annotations, preprocess: Preprocessor, cache: LengthCache) -> None:
        """Loads what the cache has. Raises ConfigError when it cannot be written to."""
        self._annotations, self._preprocess, self._cache = annotations, preprocess, cache
        self._key = key_of(annotations, preprocess, annotations.path)
        self.columns = np.zeros(len(annotations), LENGTH_COLUMNS)
        self.columns["text"] = UNKNOWN
        self.defects: dict[int, str] = {}
        self._missing = len(annotations)
        self._load_cached()
        self._saved = time.monotonic()
        if self._missing:
            cache.check()

    def __len__(self) -> int:
        return len(self.columns)

    def missing(self, rows: np.ndarray | None = None) -> list[RowChunk]:
        """Those of these rows (None: of all) that are still to be measured, in chunks."""
        rows = np.arange(len(self)) if rows is None else np.unique(rows)
        return self.chunks(rows[self._unknown(rows)])

    def chunks(self, rows: np.ndarray) -> list[RowChunk]:
        """Rows in chunks, whatever is known of them."""
        return [
            RowChunk(self._annotations.dataset, rows[start : start + MEASURED_ROWS])
            for start in range(0, len(rows), MEASURED_ROWS)
        ]

    def measure(self, rows: np.ndarray) -> Lengths:
        """Lengths of these rows."""
        return measure_lengths(self._annotations, self._preprocess, rows)

    def decode(self, rows: np.ndarray) -> dict[tuple[str, int], str]:
        """Defects that decoding these rows finds, by dataset and row."""
        found = {}
        for row in rows.tolist():
            try:
                record = self._annotations.record(row)
                sample = self._preprocess(record)
                with located(record.where):
                    self._preprocess.pictures.require_readable(sample)
            except DataError as error:
                found[self._annotations.dataset, row] = str(error)
        return found

    def learn(self, rows: np.ndarray, lengths: Lengths) -> None:
        """Store the lengths of these rows. All lengths are written to disk now and then, and once all are known."""
        unknown = int(self._unknown(rows).sum())
        self.columns[rows] = lengths.columns
        self.defects |= {int(rows[index]): message for index, message in lengths.defects.items()}
        self._missing -= unknown
        if unknown and (not self._missing or time.monotonic() - self._saved > SAVE_S):
            self._load_cached()  # another run may have measured what this one has not
            self._cache.save(self._key, Lengths(self.columns, self.defects))
            self._saved = time.monotonic()

    def leave_out(self, rows: Sequence[int]) -> None:
        """Count these rows as defective, whatever was measured."""
        known = len(self)  # a dataset that has lost rows is refused elsewhere: `Sampler.load_state_dict`
        fresh = np.array([row for row in rows if row < known and row not in self.defects], dtype=np.int64)
        self._missing -= int(self._unknown(fresh).sum())
        self.columns[fresh] = 0
        reason = "was defective when this run began, and stays left out until its end"
        self.defects |= {row: f"{self._annotations.where(row)}: {reason}" for row in fresh.tolist()}

    def of(self, rows: np.ndarray) -> np.ndarray:
        """LENGTH_COLUMNS of these rows; those that are not known are measured now, one by one."""
        if self._missing:
            for chunk in self.missing(rows):
                self.learn(chunk.rows, self.measure(chunk.rows))
        return self.columns[rows]

    def _unknown(self, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Which of these rows (all, by default) are still to be measured; bool [rows]."""
        unknown: np.ndarray = self.columns["text"][rows] == UNKNOWN
        return unknown

    def _load_cached(self) -> None:
        """Load unknown lengths from disk. Those that were missing or broken before may be there by now."""
        kept = self._cache.load(self._key)
        if kept is None:
            return
        rows = np.flatnonzero(self._unknown() & (kept.columns["text"] > 0))
        self.columns[rows] = kept.columns[rows]
        self._missing -= len(rows)


class MeasuredDataset:
    """A dataset with a table for each of its annotations."""

    def __init__(self, dataset: Dataset, preprocess: Preprocessor, cache: LengthCache, whole: bool = True) -> None:
        """whole: all lengths are measured before the first step; otherwise each when a step needs it."""
        self._dataset, self._whole = dataset, whole
        self.tables: Mapping[str, LengthTable] = {
            name: LengthTable(annotations, preprocess, cache) for name, annotations in dataset.annotations().items()
        }

    def __len__(self) -> int:
        """Samples of one epoch."""
        return len(self._dataset)

    def loads(self, indices: np.ndarray, epoch: int) -> Loads:
        """Image tokens and tokens of samples of an epoch, int64; both 0 where a sample is defective."""
        columns = self.columns(indices, epoch)
        return Loads(columns["vision"].astype(np.int64), columns["text"].astype(np.int64))

    def columns(self, indices: np.ndarray, epoch: int) -> np.ndarray:
        """LENGTH_COLUMNS of samples of an epoch; all 0 where a sample is defective."""
        columns = np.zeros(len(indices), LENGTH_COLUMNS)
        for portion, given, inside in self._dataset.portions(indices):
            columns[given] = self.tables[portion.annotations.dataset].of(portion.rows(inside, epoch))
        return columns

    def of_epoch(self, epoch: int) -> dict[str, np.ndarray]:
        """LENGTH_COLUMNS of the samples that an epoch shows of each dataset."""
        found = {name: np.zeros(0, LENGTH_COLUMNS) for name in self.tables}
        for portion, _, inside in self._dataset.portions(np.arange(len(self))):
            name = portion.annotations.dataset
            found[name] = np.concatenate([found[name], self.tables[name].of(portion.rows(inside, epoch))])
        return found

    def defects(self, indices: np.ndarray, epoch: int) -> list[str]:
        """The defect of each of these defective samples of an epoch."""
        found = [""] * len(indices)
        for portion, given, inside in self._dataset.portions(indices):
            defects = self.tables[portion.annotations.dataset].defects
            for index, row in zip(given.tolist(), portion.rows(inside, epoch).tolist(), strict=True):
                found[index] = defects[row]
        return found

    def measure(self, chunk: RowChunk) -> Lengths:
        """Lengths of a chunk; any process with the same dataset may measure it."""
        return self.tables[chunk.dataset].measure(chunk.rows)

    def missing(self, indices: np.ndarray) -> list[RowChunk]:
        """Rows to measure before the first step: with `whole` all rows of the datasets, else those of `indices`, which
        are samples of the first epoch."""
        if self._whole:
            return [chunk for table in self.tables.values() for chunk in table.missing()]
        rows: dict[str, list[np.ndarray]] = {}
        for portion, _, inside in self._dataset.portions(indices):
            rows.setdefault(portion.annotations.dataset, []).append(portion.rows(inside, 0))
        return [chunk for name, found in rows.items() for chunk in self.tables[name].missing(np.concatenate(found))]

    def chunks(self) -> list[RowChunk]:
        """All samples, whatever is known of them."""
        return [chunk for table in self.tables.values() for chunk in table.chunks(np.arange(len(table)))]

    def left_out(self) -> dict[str, list[int]]:
        """Rows that are known to be defective, by dataset."""
        return {name: sorted(table.defects) for name, table in self.tables.items() if table.defects}

    def leave_out(self, rows: Mapping[str, Sequence[int]]) -> None:
        """Go on without the samples that were left out before, though some may be mended by now."""
        for name, of_dataset in rows.items():
            if name in self.tables:
                self.tables[name].leave_out(of_dataset)

    def decode(self, chunk: RowChunk) -> dict[tuple[str, int], str]:
        """Defects that decoding every sample of a chunk finds, by dataset and row."""
        return self.tables[chunk.dataset].decode(chunk.rows)

    def learn(self, chunk: RowChunk, lengths: Lengths) -> None:
        """Store the lengths of a chunk."""
        self.tables[chunk.dataset].learn(chunk.rows, lengths)
