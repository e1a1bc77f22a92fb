"""Lengths of all samples of a dataset: what is known of them, what is still to be measured, and what a step needs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dhp.data.annotations import Annotations
from dhp.data.balance.packs import Loads
from dhp.data.lengths import LengthCache, Lengths, key_of, measure
from dhp.data.preprocess import Preprocessor
from dhp.data.source import Dataset
from dhp.errors import DataError

CHUNK = 250  # samples that are measured in one go: a second, or minutes where videos must be counted or fetched
SAVE_S = 30.0  # between two writes while lengths are being measured: what a stopped run may lose
UNKNOWN = -1


@dataclass(frozen=True)
class Chunk:
    """Rows `start` to `stop` of a dataset's annotations."""

    dataset: str
    start: int
    stop: int


class LengthTable:
    """Lengths of one dataset's samples, as far as they are known; kept on disk, also before all are."""

    def __init__(self, annotations: Annotations, preprocess: Preprocessor, cache: LengthCache) -> None:
        """Takes what the cache has. Raises ConfigError when it cannot be written to."""
        self._annotations, self._preprocess, self._cache = annotations, preprocess, cache
        self._key = key_of(annotations, preprocess, annotations.path)
        known = cache.load(self._key)
        rows = len(annotations)
        self.vision = np.zeros(rows, dtype=np.int32) if known is None else known.vision
        self.text = np.full(rows, UNKNOWN, dtype=np.int32) if known is None else known.text
        self.defects: dict[int, str] = {}
        if known is not None:  # what was missing or broken may be there by now
            self.text[list(known.defects)] = UNKNOWN
        self._missing = int((self.text == UNKNOWN).sum())
        self._saved = time.monotonic()
        if self._missing:
            cache.check()

    def missing(self) -> list[Chunk]:
        """What is to be measured, in chunks."""
        unknown = np.flatnonzero(self.text == UNKNOWN)
        starts = np.unique(unknown // CHUNK) * CHUNK
        return [Chunk(self._annotations.dataset, int(s), min(int(s) + CHUNK, len(self.text))) for s in starts]

    def measure(self, start: int, stop: int) -> Lengths:
        """Lengths of rows `start` to `stop`."""
        return measure(self._annotations, self._preprocess, start, stop)

    def decode(self, start: int, stop: int) -> dict[tuple[str, int], str]:
        """What decoding rows `start` to `stop` finds to be wrong, by dataset and row."""
        found = {}
        for row in range(start, stop):
            try:
                self._preprocess(self._annotations.record(row))
            except DataError as error:
                found[self._annotations.dataset, row] = str(error)
        return found

    def learn(self, start: int, lengths: Lengths) -> None:
        """Take the lengths of rows from `start` on; now and then, and with the last ones, write all to disk."""
        stop = start + len(lengths.text)
        unknown = int((self.text[start:stop] == UNKNOWN).sum())
        self.vision[start:stop], self.text[start:stop] = lengths.vision, lengths.text
        self.defects |= {start + row: message for row, message in lengths.defects.items()}
        self._missing -= unknown
        if unknown and (not self._missing or time.monotonic() - self._saved > SAVE_S):
            self._cache.save(self._key, Lengths(self.vision, self.text, self.defects))
            self._saved = time.monotonic()

    def of(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Vision and text of these rows, int32; those that are not known are measured now, one by one."""
        if self._missing:
            for row in rows[self.text[rows] == UNKNOWN]:
                self.learn(int(row), self.measure(int(row), int(row) + 1))
        return self.vision[rows], self.text[rows]


class MeasuredDataset:
    """A dataset with a table for each of its annotations."""

    def __init__(self, dataset: Dataset, preprocess: Preprocessor, cache: LengthCache, whole: bool = True) -> None:
        """whole: all is to be measured before the first step; else what a step needs, when it needs it."""
        self._dataset, self._whole = dataset, whole
        self.tables: Mapping[str, LengthTable] = {
            name: LengthTable(annotations, preprocess, cache) for name, annotations in dataset.annotations().items()
        }

    def __len__(self) -> int:
        """Samples of one epoch."""
        return len(self._dataset)

    def loads(self, indices: np.ndarray, epoch: int) -> Loads:
        """Image tokens and tokens of samples of an epoch, int64; both 0 where a sample is defective."""
        vision, text = np.zeros((2, len(indices)), dtype=np.int64)
        for portion, places, inside in self._dataset.portions(indices):
            table = self.tables[portion.annotations.dataset]
            vision[places], text[places] = table.of(portion.rows(inside, epoch))
        return Loads(vision, text)

    def defects(self, indices: np.ndarray, epoch: int) -> list[str]:
        """What is wrong with each of these defective samples of an epoch."""
        found = [""] * len(indices)
        for portion, places, inside in self._dataset.portions(indices):
            defects = self.tables[portion.annotations.dataset].defects
            for place, row in zip(places.tolist(), portion.rows(inside, epoch).tolist(), strict=True):
                found[place] = defects[row]
        return found

    def measure(self, chunk: Chunk) -> Lengths:
        """Lengths of a chunk; whoever has the same dataset may do it."""
        return self.tables[chunk.dataset].measure(chunk.start, chunk.stop)

    def missing(self) -> list[Chunk]:
        """All that is to be measured before the first step."""
        return [] if not self._whole else [chunk for table in self.tables.values() for chunk in table.missing()]

    def chunks(self) -> list[Chunk]:
        """All samples, whatever is known of them."""
        return [
            Chunk(name, start, min(start + CHUNK, len(table.text)))
            for name, table in self.tables.items()
            for start in range(0, len(table.text), CHUNK)
        ]

    def decode(self, chunk: Chunk) -> dict[tuple[str, int], str]:
        """What decoding every sample of a chunk finds to be wrong, by dataset and row."""
        return self.tables[chunk.dataset].decode(chunk.start, chunk.stop)

    def learn(self, chunk: Chunk, lengths: Lengths) -> None:
        """Take the lengths of a chunk."""
        self.tables[chunk.dataset].learn(chunk.start, lengths)
