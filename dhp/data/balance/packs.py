"""Packs: a micro-batch's samples, their order and balance."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

import numpy as np

TEXT_ROOM = 128  # tokens, between Q_t and Q'_t


@dataclass(frozen=True)
class Loads:
    """Cost of each sample for either part. vision: tiles or patches; text: tokens of the decoder, images included.

    Both int64 [samples]."""

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

    passes: of ISF, at most."""

    vision: int
    text: int
    samples: int = 4
    full_vision: int | None = None
    full_text: int | None = None
    soft: bool = False
    passes: int = 10

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


def chosen(number: np.ndarray) -> Packs:
    """Packs from the number of each sample's pack, int [samples], of the samples that have one: others are below 0."""
    held = np.flatnonzero(number >= 0)
    packs = from_groups(number[held])
    return Packs(held[packs.samples], packs.ends)


def join(parts: Sequence[Packs]) -> Packs:
    """All packs of `parts`, in order."""
    shifts = np.cumsum([0, *(len(part.samples) for part in parts)])
    ends = [part.ends + shift for part, shift in zip(parts, shifts)]
    return Packs(np.concatenate([part.samples for part in parts]), np.concatenate(ends))


Method = Callable[[Loads, Limits, int, int], Packs]  # how packs are made: loads, limits, rows of a step, seed

SMALL_UNITS = 64  # vision units a pack; with fewer, no pack can meet a target that is not whole


def least_bins(vision: float, text: float, limits: Limits) -> int:
    """How many packs hold these totals within the limits. Where a pack has few units of vision, their mean number is
    brought down to a whole one."""
    bins = max(1, ceil(vision / limits.vision), ceil(text / limits.text))
    target = vision / bins + 1e-3  # one bin more than needed must not cost a whole unit
    return ceil(vision / int(target)) if 1.0 <= target < SMALL_UNITS else bins


def whole_shares(total: int, bins: int) -> np.ndarray:
    """`total` in whole shares that differ by one at most, the larger ones spread evenly: int64 [bins]."""
    return np.diff(np.arange(bins + 1) * total // max(bins, 1))


def others_than(chosen: np.ndarray, count: int) -> np.ndarray:
    """Which of `count` items are not among the chosen ones, ascending."""
    free = np.ones(count, dtype=np.bool_)
    free[chosen] = False
    return np.flatnonzero(free)


def single(samples: np.ndarray) -> Packs:
    """Each sample in a pack of its own."""
    return Packs(samples, np.arange(1, len(samples) + 1))


def divisible(packs: Packs, replicas: int) -> Packs:
    """Some packs halved, those of most samples, so that `replicas` divides their number; if there are enough."""
    missing = -len(packs) % replicas
    if not missing:
        return packs
    chosen = np.argsort(-packs.counts, kind="stable")[:missing]
    middles = (packs.starts[chosen] + packs.counts[chosen] // 2)[packs.counts[chosen] > 1]
    return Packs(packs.samples, np.sort(np.concatenate([packs.ends, middles])))


def shuffled_steps(order: np.ndarray, packs: Packs, replicas: int, rng: np.random.Generator) -> Packs:
    """Each `replicas` neighbours of the order a step; steps at random, a short one last."""
    whole = len(order) // replicas * replicas
    steps = rng.permutation(order[:whole].reshape(-1, replicas)).reshape(-1)
    return packs.reordered(np.concatenate([steps, order[whole:]]))


QUADRATIC_TOKENS = 36864  # 6 × hidden: tokens at which attention's products cost as much as the matrices (hidden 6144)


@dataclass(frozen=True)
class BalanceMetrics:
    """How balanced an epoch's packs are: counts of samples and packs, and ratios.

    dropped: samples that no pack holds.

    pad: PadRatio of a pack, in the mean (OmniBal, eq. 1).

    dist_vision, dist_text, dist_flops: DistRatio of a step, in the mean, of vision, of text and of the decoder's
    operations: each replica has what its own packs hold (eq. 2). dist_assigned: of vision where the images of a step
    go to any rank, one by one, as runs of dhp assign them.

    cv_vision, cv_text: standard deviation of a pack's load over its mean, in the whole epoch.

    stage_idle: share of the time that one of two stages, through which the packs go, spends waiting for the other.

    bias: variance of the mean number of samples a pack in a step, over the variance that packs in random order would
    give (1.0). Where steps are sorted it grows with the replicas, so compare it at one number of replicas.

    critical: text of each step's longest device, summed over steps, over an even share of all text."""

    samples: int
    packs: int
    dropped: int
    pad: float
    dist_vision: float
    dist_assigned: float
    dist_text: float
    dist_flops: float
    cv_vision: float
    cv_text: float
    stage_idle: float
    bias: float
    critical: float


def measure_balance(packs: Packs, loads: Loads, replicas: int, padded: bool) -> BalanceMetrics:
    """Measure the packs of one epoch. padded: a batch is padded to its longest sample, and costs that."""
    counts = packs.counts
    vision = packs.sums(loads.vision).astype(np.float64)
    tokens = packs.sums(loads.text).astype(np.float64)
    longest = packs.maxima(loads.text).astype(np.float64)
    text = longest * counts if padded else tokens
    lengths = np.repeat(longest, counts) if padded else loads.text[packs.samples].astype(np.float64)
    flops = _sums(lengths * (1.0 + lengths / QUADRATIC_TOKENS), packs)
    relative = np.maximum(vision / max(vision.mean(), 1e-9), text / text.mean())
    of_steps = _steps(text, replicas)
    return BalanceMetrics(
        samples=len(packs.samples),
        packs=len(packs),
        dropped=len(loads) - len(np.unique(packs.samples)),
        pad=float((1.0 - tokens / text).mean()),
        dist_vision=_dist(_steps(vision, replicas)),
        dist_assigned=_dist(_assigned(vision, replicas)),
        dist_text=_dist(of_steps),
        dist_flops=_dist(_steps(flops, replicas)),
        cv_vision=_cv(vision),
        cv_text=_cv(text),
        stage_idle=float(1.0 - 1.0 / relative.mean()),
        bias=_bias(counts, replicas),
        critical=float(of_steps.max(axis=1).sum() / (of_steps.sum() / replicas)),
    )


def dist_ratio(devices: np.ndarray) -> float:
    """DistRatio of one step: loads [devices]. 0 where no device has any."""
    most = devices.max(initial=0)
    return float((most - devices).sum() / (most * len(devices))) if most else 0.0


def _sums(values: np.ndarray, packs: Packs) -> np.ndarray:
    return np.add.reduceat(values, packs.starts)


def _steps(of_packs: np.ndarray, replicas: int) -> np.ndarray:
    """[steps, replicas]; a last step of fewer packs is left out, unless there is no other."""
    if len(of_packs) < replicas:
        return np.pad(of_packs, (0, replicas - len(of_packs)))[None]
    whole = len(of_packs) // replicas * replicas
    return of_packs[:whole].reshape(-1, replicas)


def _assigned(vision: np.ndarray, replicas: int) -> np.ndarray:
    """Loads of the vision ranks where single units go to any rank: none has more than one unit more than another."""
    totals = _steps(vision, replicas).sum(axis=1)
    low = np.floor(totals / replicas)
    return low[:, None] + (np.arange(replicas) < (totals - low * replicas)[:, None])


def _dist(steps: np.ndarray) -> float:
    most = steps.max(axis=1)
    at_work = most > 0
    if not at_work.any():
        return 0.0
    return float(((most[:, None] - steps).sum(axis=1)[at_work] / (most[at_work] * steps.shape[1])).mean())


def _cv(values: np.ndarray) -> float:
    return float(values.std() / max(values.mean(), 1e-9))


def _bias(counts: np.ndarray, replicas: int) -> float:
    """See `BalanceMetrics.bias`."""
    steps = _steps(counts.astype(np.float64), replicas)
    return float(steps.mean(axis=1).var() / (steps.var() / replicas)) if steps.size and steps.var() else 0.0
