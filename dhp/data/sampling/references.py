"""Log-probabilities of preferences' answers by their reference, on disk: a file for each dataset."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from dhp.core.errors import ConfigError, DataError
from dhp.core.files import replaced
from dhp.data.read.annotations import Annotations
from dhp.data.read.records import Record
from dhp.data.sample.preprocess import Preprocessor
from dhp.data.sampling.length_table import key_of


class ReferenceTable:
    """Of the samples of some datasets, by row. It is read when a sample first asks, which is after it was written."""

    def __init__(
        self, folder: Path, reference: str, datasets: Mapping[str, Annotations], preprocess: Preprocessor
    ) -> None:
        """reference: digest of the model that they are of."""
        keys = {name: key_of(one, preprocess, one.path) for name, one in datasets.items()}
        digests = {name: hashlib.sha256(f"{key} {reference}".encode()).hexdigest() for name, key in keys.items()}
        self._paths = {name: folder / f"{digest}.npy" for name, digest in digests.items()}
        self._sizes = {name: len(one) for name, one in datasets.items()}
        self._known: dict[str, np.ndarray] = {}

    def missing(self) -> list[str]:
        """Datasets without a file."""
        return [name for name in self._paths if self._load(name) is None]

    def keep(self, name: str, values: Mapping[int, Sequence[float]]) -> None:
        """Write a dataset's, by row, 0-based. Raises ConfigError where the folder cannot be written to."""
        table = np.full((self._sizes[name], 2), np.nan)
        for row, of_sides in values.items():
            table[row] = of_sides
        try:
            with replaced(self._paths[name]) as unfinished, unfinished.open("wb") as file:
                np.save(file, table)
        except OSError as error:
            raise ConfigError(
                f"log-probabilities of the reference cannot be kept in {self._paths[name].parent}: "
                f"{error.strerror or error}. Set data.cache_dir to a folder that can be written to and has room"
            ) from error

    def __call__(self, record: Record) -> tuple[float, float]:
        """Of both sides of a sample. Raises DataError, with the reason alone, where they are not known."""
        if record.dataset not in self._known:
            table = self._load(record.dataset)
            if table is None:
                raise DataError(
                    f"no log-probabilities of the reference are in {self._paths[record.dataset].parent} for this model "
                    "and these rows: a run with them computes them before its first step. Set data.cache_dir to that "
                    "run's, or begin one with the dataset among data.eval_datasets"
                )
            self._known[record.dataset] = table
        first, second = self._known[record.dataset][record.position - 1].tolist()
        if first != first or second != second:
            raise DataError(
                "the reference has no log-probability of this sample: it could not be read before the first step, or "
                "the model itself gives none. Leave it out"
            )
        return first, second

    def _load(self, name: str) -> np.ndarray | None:
        try:
            table = np.load(self._paths[name], allow_pickle=False)
        except (OSError, ValueError, EOFError):  # none, or a damaged one, which is computed again
            return None
        fits = table.dtype == np.float64 and table.shape == (self._sizes[name], 2)
        return table if fits else None
