"""Loads of steps by the run's sampler, before it runs.

A table's mean does not tell it: a step waits for its slowest text replica, and a rank must have room for its worst row.
A row is what one text replica holds in one micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np

from dhp.core.errors import DataError
from dhp.data.balance.packs import Loads
from dhp.data.sampling.sampler import RANDOM, BalanceSettings, BatchLayout, RandomSampler, Sampler

if TYPE_CHECKING:
    from dhp.data.sampling.length_table import MeasuredDataset

EMPTY_TOKENS = 1  # of padding, in a row without samples: what its rank computes all the same


class LengthSource(Protocol):
    """Samples of known lengths, as `dhp.data.sampling.length_table.MeasuredDataset` has them."""

    def __len__(self) -> int: ...

    def columns(self, indices: np.ndarray, epoch: int) -> np.ndarray: ...

    def loads(self, indices: np.ndarray, epoch: int) -> Loads: ...

    def defects(self, indices: np.ndarray, epoch: int) -> list[str]: ...


@dataclass(frozen=True, eq=False)
class Table:
    """Lengths of samples by their number, the same in every epoch.

    rows: [samples], fields of LENGTH_COLUMNS, at least `vision` and `text`; both 0 where a sample is defective."""

    rows: np.ndarray

    def __post_init__(self) -> None:
        unknown = np.flatnonzero(self.rows["text"] < 0)
        if len(unknown):
            raise ValueError(f"lengths of {len(unknown)} samples are not measured, the first of them {unknown[0]}")

    @classmethod
    def of(cls, loads: Loads) -> Table:
        """Where no more is known than tokens and image tokens."""
        rows = np.zeros(len(loads), [("vision", np.int64), ("text", np.int64)])
        rows["vision"], rows["text"] = loads.vision, loads.text
        return cls(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def columns(self, indices: np.ndarray, epoch: int) -> np.ndarray:
        """As `MeasuredDataset.columns`."""
        return self.rows[indices]

    def loads(self, indices: np.ndarray, epoch: int) -> Loads:
        """As `MeasuredDataset.loads`."""
        return Loads(self.rows["vision"][indices].astype(np.int64), self.rows["text"][indices].astype(np.int64))

    def defects(self, indices: np.ndarray, epoch: int) -> list[str]:
        """As `MeasuredDataset.defects`, which knows more of them."""
        return [f"sample {index} is defective" for index in indices.tolist()]


@dataclass(frozen=True)
class Row:
    """One row.

    step: 0-based, from the run's beginning; None: no step has it, it is a bound.

    samples: their numbers in the epoch, without defective ones. tokens, pairs: as in `StepLoads`.

    vision: image tokens. patches: that enter the tower; None: not known."""

    step: int | None
    samples: tuple[int, ...]
    tokens: int
    pairs: int
    vision: int
    patches: int | None


@dataclass(frozen=True, eq=False)
class StepLoads:
    """The loads of all steps of one epoch.

    first: number of its first step, 0-based, from the run's beginning.

    tokens, pairs: of each row, int64 [steps, micro_batches, replicas]: the decoder's tokens, padding included, and
    Σ tokens² over the row's samples as they are laid out, which attention costs; of a preference over both sides.

    vision, pictures: image tokens and pictures of each row, of the same shape. Where pictures were not counted, each
    sample with image tokens has one.

    totals: int64 [steps], of all samples of a step together and without padding, by the name of each column that is
    known (`dhp.data.sample.sample.Length`: text, vision, patches, squares, targets, pictures and so on).

    samples, ends: numbers of the samples of all rows one after another, and where each row ends among them.

    columns: lengths of the epoch's samples, by number."""

    first: int
    tokens: np.ndarray
    pairs: np.ndarray
    vision: np.ndarray
    pictures: np.ndarray
    totals: Mapping[str, np.ndarray]
    samples: np.ndarray
    ends: np.ndarray
    columns: np.ndarray

    def __len__(self) -> int:
        """Steps of the epoch."""
        return len(self.tokens)

    def row(self, step: int, micro_batch: int, replica: int) -> Row:
        """One row. step: within the epoch, 0-based."""
        number = int(np.ravel_multi_index((step, micro_batch, replica), self.tokens.shape))
        samples = self.samples[self.ends[number - 1] if number else 0 : self.ends[number]]
        counts = (self.tokens.flat[number], self.pairs.flat[number])
        return _row(self.first + step, samples, self.columns, *counts)

    def worst_row(self, of_vision: float = 0.0) -> Row:
        """The row with most tokens, the first of several. of_vision: what an image token counts beyond the one that it
        is, for what a rank must have room for."""
        worst = int((self.tokens + of_vision * self.vision).argmax())
        step, micro_batch, replica = map(int, np.unravel_index(worst, self.tokens.shape))
        return self.row(step, micro_batch, replica)


def step_loads(
    dataset: LengthSource,
    balancing: BalanceSettings,
    layout: BatchLayout,
    seed: int,
    *,
    packing: bool = True,
    shuffle: bool = True,
    on_bad_sample: str = "error",
    epoch: int = 0,
) -> StepLoads:
    """The loads of one epoch's steps in a run of these settings: rows are what the run's own sampler hands out. Samples
    that only decoding finds defective count as good.

    packing: rows are packed, as they always are where ranks share a sequence.

    Raises DataError where the run would for want of samples, and for a defective one unless on_bad_sample is "skip"."""
    columns = dataset.columns(np.arange(len(dataset)), epoch)
    defective = np.flatnonzero(columns["text"] <= 0)
    if len(defective) == len(columns):
        raise DataError("not one sample of the datasets can be used; `python -m dhp inspect data` tells why")
    if len(defective) and on_bad_sample != "skip":
        raise DataError(dataset.defects(defective[:1], epoch)[0])
    sampler = make_sampler(dataset, balancing, layout, seed, shuffle, on_bad_sample)
    first = sampler.steps(epoch) if epoch else 0
    samples, ends = _rows(sampler, first, sampler.steps(epoch + 1))
    usable = columns["text"][samples] > 0  # random rows lose defective samples when they are read
    samples, ends = samples[usable], np.concatenate([[0], np.cumsum(usable)])[ends]
    shape = (-1, layout.micro_batches, layout.replicas)
    lengths = columns["text"][samples].astype(np.int64)
    squares = columns["pairs"][samples] if "pairs" in (columns.dtype.names or ()) else lengths**2
    laid = _packed if packing else _padded
    tokens, pairs = laid(lengths, ends, EMPTY_TOKENS), laid(squares, ends, EMPTY_TOKENS**2)
    of_rows = {name: _sums(columns[name][samples], ends).reshape(shape) for name in columns.dtype.names or ()}
    totals = {name: values.sum(axis=(1, 2)) for name, values in of_rows.items()}
    shown = columns["pictures" if "pictures" in of_rows else "vision"][samples]
    pictures = of_rows.get("pictures", _sums(shown > 0, ends).reshape(shape))
    by_row = (tokens.reshape(shape), pairs.reshape(shape), of_rows["vision"], pictures)
    return StepLoads(first, *by_row, totals, samples, ends, columns)


def make_sampler(
    dataset: LengthSource, balancing: BalanceSettings, layout: BatchLayout, seed: int, shuffle: bool, on_bad_sample: str
) -> Sampler:
    """The sampler of a run: balancing.method says which kind."""
    if balancing.method == RANDOM:
        return RandomSampler(len(dataset), layout, seed, shuffle)
    from dhp.data.sampling.balanced_sampler import BalancedSampler

    return BalancedSampler(cast("MeasuredDataset", dataset), balancing, layout, seed, on_bad_sample)


def _rows(sampler: Sampler, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    """The samples of all rows of some steps one after another, and where each row ends among them."""
    micro_batches = chain.from_iterable(sampler.batch(step).samples for step in range(first, last))
    rows = list(chain.from_iterable(micro_batches))
    ends = np.cumsum(np.fromiter(map(len, rows), np.int64, len(rows)))
    return np.fromiter(chain.from_iterable(rows), np.int64, int(ends[-1])), ends


def _packed(values: np.ndarray, ends: np.ndarray, empty: int) -> np.ndarray:
    """Tokens, or pairs, of each row, whose samples lie one behind another. empty: of a row without samples."""
    return _sums(values, ends) + empty * (np.diff(ends, prepend=0) == 0)


def _padded(values: np.ndarray, ends: np.ndarray, empty: int) -> np.ndarray:
    """The same of rows whose samples are padded to the longest."""
    counts = np.diff(ends, prepend=0)
    held = counts > 0
    longest = np.full(len(ends), empty)
    longest[held] = np.maximum.reduceat(values, (ends - counts)[held])
    return longest * np.maximum(counts, 1)


def _sums(values: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Sums of the values of each row, of which some may be empty: int64 [rows]."""
    return np.diff(np.concatenate([[0], np.cumsum(values, dtype=np.int64)])[ends], prepend=0)


def _row(step: int | None, samples: np.ndarray, columns: np.ndarray, tokens: int, pairs: int) -> Row:
    total = {name: int(columns[name][samples].sum(dtype=np.int64)) for name in columns.dtype.names or ()}
    return Row(step, tuple(samples.tolist()), int(tokens), int(pairs), total["vision"], total.get("patches"))
