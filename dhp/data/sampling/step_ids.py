"""Which samples a step has: a digest of them, and their names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from zlib import crc32

import numpy as np

from dhp.data.sampling.dataset import Dataset, Portion
from dhp.data.sampling.sampler import StepBatch


def rows_of(dataset: Dataset, batch: StepBatch) -> dict[str, np.ndarray]:
    """The rows of a step's samples in their annotations (0-based, ascending, int64), by dataset in order of names."""
    rows: dict[str, list[np.ndarray]] = {}
    for portion, _, found in _rows(dataset, batch):
        rows.setdefault(portion.annotations.dataset, []).append(found)
    return {name: np.sort(np.concatenate(rows[name])).astype("<i8") for name in sorted(rows)}


def digest(rows: Mapping[str, np.ndarray]) -> str:
    """Eight hex digits (CRC-32) of a step's samples, as `rows_of` has them: of each dataset its name and the rows. The
    same wherever they are computed, in whatever order."""
    value = 0
    for name, found in rows.items():
        value = crc32(name.encode() + b"\0", value)
        value = crc32(found.tobytes(), value)
    return f"{value:08x}"


def names(dataset: Dataset, batch: StepBatch) -> tuple[str, ...]:
    """A step's samples, micro-batch by micro-batch: where each is, and the index by which `inspect sample` shows it,
    where the first epoch has it."""
    found: dict[int, str] = {}
    for portion, at, rows in _rows(dataset, batch):
        shown = portion.rows(np.arange(len(portion)), 0)
        before = dataset.first(portion)
        for number, row in zip(at.tolist(), rows.tolist(), strict=True):
            (first,) = np.flatnonzero(shown == row)[:1].tolist() or (None,)
            index = "" if first is None else f"index={before + first}, "
            found[number] = index + portion.annotations.where(row)
    return tuple(found[number] for number in sorted(found))


def _rows(dataset: Dataset, batch: StepBatch) -> Iterator[tuple[Portion, np.ndarray, np.ndarray]]:
    """Each portion that has some of a step's samples, which of them they are, and their rows there."""
    indices = np.array(list(chain.from_iterable(chain.from_iterable(batch.samples))), dtype=np.int64)
    for portion, at, inside in dataset.portions(indices):
        yield portion, at, portion.rows(inside, batch.epoch)
