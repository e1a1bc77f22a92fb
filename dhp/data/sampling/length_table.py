"""Tables of the lengths of a dataset's samples: known ones, those still to be measured, and those that a step needs."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dhp.core.errors import DataError
from dhp.data.balance.packs import Loads
from dhp.data.read.annotations import Annotations
from dhp.data.read.records import located
from dhp.data.sample.lengths import LENGTH_COLUMNS
from dhp.data.sample.preprocess import Preprocessor
from dhp.data.sampling.dataset import Dataset
from dhp.data.sampling.length_cache import LengthCache, Lengths, key_of, measure_lengths

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

    columns: LENGTH_COLUMNS [samples]; where text is UNKNOWN, the others are 0.
    """

    def __init__(self, annotations: Annotations, preprocess: Preprocessor, cache: LengthCache) -> None:
        """Loads what the cache has. Raises ConfigError when it cannot be written to."""
        self._annotations, self._preprocess, self._cache = annotations, preprocess, cache
        self._key = key_of(annotations, preprocess, annotations.path)
        self.columns = np.zeros(len(annotations), LENGTH_COLUMNS)
        self.columns["text"] = UNKNOWN
        self.defects: dict[int, str] = {}
        self._missing = len(annotations)
        self._take_kept()
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
            self._take_kept()  # another run may have measured what this one has not
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

    def _take_kept(self) -> None:
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
