"""Packs: the samples of one replica's micro-batch, in the order of training. Pure data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

TEXT_ROOM = 128  # tokens, between Q_t and Q'_t


@dataclass(frozen=True)
class Loads:
    """Cost of each sample for either part. vision: tiles or patches; text: tokens of the decoder, images included.

    Both int64 [samples].
    """

    vision: np.ndarray
    text: np.ndarray

    def __len__(self) -> int:
        return len(self.text)


@dataclass(frozen=True)
class Limits:
    """The most that a pack may hold; a sample beyond a limit gets a pack of its own.

    vision, text: the most of each.

    samples: how many, for methods that fix the number.

    full_vision, full_text: ISF keeps a pack that holds so much (Q'_v and Q'_t); None: see `full`.

    soft: `text` is a mean, not a bound: a pack may hold some tokens more if that makes all others even.

    passes: of ISF, at most. window: steps whose samples are sorted together where like ones are put together.
    """

    vision: int
    text: int
    samples: int = 4
    full_vision: int | None = None
    full_text: int | None = None
    soft: bool = False
    passes: int = 10
    window: int = 50

    @property
    def full(self) -> tuple[int, int]:
        """The vision and the text from which on ISF takes a pack for full; as published, Q_v and Q_t − 128."""
        vision = self.vision if self.full_vision is None else self.full_vision
        return vision, self.text - TEXT_ROOM if self.full_text is None else self.full_text


@dataclass(frozen=True)
class Packs:
    """Packs in the order of training: one for each of `replicas`, then the next `replicas`.

    samples: int64, the samples of all packs one after another. ends: int64 [packs], where each pack ends in `samples`.
    """

    samples: np.ndarray
    ends: np.ndarray

    def __len__(self) -> int:
        return len(self.ends)

    @property
    def starts(self) -> np.ndarray:
        """Where each pack begins."""
        return np.concatenate([[0], self.ends[:-1]]).astype(np.int64)

    @property
    def counts(self) -> np.ndarray:
        """Samples of each pack."""
        return np.diff(self.ends, prepend=0)

    def pack(self, index: int) -> np.ndarray:
        """The samples of one pack."""
        start = self.ends[index - 1] if index else 0  # not `starts`, which lists those of millions of packs
        return self.samples[start : self.ends[index]]

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Of each pack, the sum of its samples' values. Packs are not empty."""
        return np.add.reduceat(values[self.samples], self.starts)

    def maxima(self, values: np.ndarray) -> np.ndarray:
        """Of each pack, the largest of its samples' values."""
        return np.maximum.reduceat(values[self.samples], self.starts)

    def reordered(self, order: np.ndarray) -> Packs:
        """The same packs in another order, `order` holding pack numbers."""
        counts = self.counts[order]
        ends = np.cumsum(counts)
        inside = np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)
        return Packs(self.samples[np.repeat(self.starts[order], counts) + inside], ends)


def from_groups(group: np.ndarray) -> Packs:
    """Packs from the number of each sample's pack: int [samples]. In order of the numbers, which may have gaps."""
    samples = np.argsort(group, kind="stable")
    ends = np.flatnonzero(np.diff(group[samples], append=-1)) + 1
    return Packs(samples, ends.astype(np.int64))


def join(parts: Sequence[Packs]) -> Packs:
    """All packs of `parts`, in order."""
    shifts = np.cumsum([0, *(len(part.samples) for part in parts)])
    ends = [part.ends + shift for part, shift in zip(parts, shifts)]
    return Packs(np.concatenate([part.samples for part in parts]), np.concatenate(ends))


Method = Callable[[Loads, Limits, int, int], Packs]  # how packs are made: loads, limits, rows of a step, seed
