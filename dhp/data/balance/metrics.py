"""How well packs are balanced. All of them together: any one alone can be made small by itself.

PadRatio and DistRatio as OmniBal (Yao et al. 2025, section 4.1) defines them: Σ_i (t_max − t_i) / (t_max B) inside a
batch, pooled over all batches; Σ_i (T_max − T_i) / (T_max N) over the N devices of a step, averaged over steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dhp.data.balance.packs import Loads, Packs

QUADRATIC_TOKENS = 36864  # 6 × hidden: tokens at which attention's products cost as much as the matrices (hidden 6144)

ENOUGH_STEPS = 30  # fewer say nothing of a variance


@dataclass(frozen=True)
class BalanceMetrics:
    """How balanced an epoch's packs are: counts of samples and packs, and ratios.

    dropped: samples that no pack holds.

    pad: PadRatio.

    dist_vision, dist_text, dist_flops: DistRatio of vision, of text and of the decoder's operations.

    cv_vision, cv_text: standard deviation of a pack's load over its mean, in the whole epoch. Where images go to any
    rank, cv_vision is of a rank's share of a step instead.

    stage_idle: share of the time that one of two stages spends waiting for the other.

    bias: variance of the mean number of samples a pack in a step, over the variance that packs in random order would
    give (1.0). Where steps are sorted it grows with the replicas, so compare it at one number of replicas.

    critical: text of each step's longest device, summed over steps, over an even share of all text.
    """

    samples: int
    packs: int
    dropped: int
    pad: float
    dist_vision: float
    dist_text: float
    dist_flops: float
    cv_vision: float
    cv_text: float
    stage_idle: float
    bias: float
    critical: float


def measure_balance(packs: Packs, loads: Loads, replicas: int, padded: bool, dispatched: bool) -> BalanceMetrics:
    """Measure the packs of one epoch.

    padded: a batch is padded to its longest sample, and costs that. dispatched: images of a step go to any vision rank,
    one by one, not to the rank of their pack.
    """
    counts = packs.counts
    vision = packs.sums(loads.vision).astype(np.float64)
    tokens = packs.sums(loads.text).astype(np.float64)
    longest = packs.maxima(loads.text).astype(np.float64)
    text = longest * counts if padded else tokens
    lengths = np.repeat(longest, counts) if padded else loads.text[packs.samples].astype(np.float64)
    flops = _sums(lengths * (1.0 + lengths / QUADRATIC_TOKENS), packs)
    of_ranks = _spread(vision, replicas) if dispatched else _steps(vision, replicas)
    in_steps = _steps(text, replicas).reshape(-1) if dispatched else text
    shares = of_ranks.reshape(-1) if dispatched else vision  # of what the two stages do at a time
    relative = np.maximum(shares / max(shares.mean(), 1e-9), in_steps / in_steps.mean())
    return BalanceMetrics(
        samples=len(packs.samples),
        packs=len(packs),
        dropped=len(loads) - len(np.unique(packs.samples)),
        pad=float(1.0 - tokens.sum() / text.sum()),
        dist_vision=_dist(of_ranks),
        dist_text=_dist(_steps(text, replicas)),
        dist_flops=_dist(_steps(flops, replicas)),
        cv_vision=_cv(shares),
        cv_text=_cv(text),
        stage_idle=float(1.0 - 1.0 / relative.mean()),
        bias=_bias(counts, None if dispatched else vision, replicas),
        critical=float(_steps(text, replicas).max(axis=1).sum() / (_steps(text, replicas).sum() / replicas)),
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


def _spread(vision: np.ndarray, replicas: int) -> np.ndarray:
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


def _bias(counts: np.ndarray, vision: np.ndarray | None, replicas: int) -> float:
    """See `BalanceMetrics.bias`.

    vision: load of each pack, where packs should be equal in it. Only steps count whose packs all hold the usual
    amount, so that mixtures of samples are compared, not amounts of vision. None: all steps count.
    """
    steps = _steps(counts.astype(np.float64), replicas)
    if vision is not None:
        values, numbers = np.unique(vision, return_counts=True)
        usual = (_steps(vision, replicas) == values[numbers.argmax()]).all(axis=1)
        if usual.sum() >= ENOUGH_STEPS and steps[usual].var() > 0:
            steps = steps[usual]
    return float(steps.mean(axis=1).var() / (steps.var() / replicas)) if steps.size and steps.var() else 0.0
