"""How much micro-batches of a step differ in the seconds of the decoder and of the tower, beside random batches."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dhp.data.balance.methods import BALANCE_METHODS as METHODS
from dhp.data.balance.micro_batches import EVENED, even_micro_batches
from dhp.data.balance.packs import Limits, Loads, Packs
from experiments.balance.sets import operations
from experiments.baselines import PADDED

MICRO_BATCHES = 4  # of a step and replica
SHARES = (0.1, 0.3, 0.5)  # of a step's operations, the tower's
RANDOM = "random"


def spread_rows(
    source: str, loads: Loads, limits: Limits, replicas: int, seed: int, names: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """A row for each method; the random ones first: padded as trainers do, and packed as `data.packing` does. Their
    towers have the pictures of their own rows; those of other methods are assigned to any rank of a micro-batch."""
    rows = replicas * MICRO_BATCHES
    ways = [(RANDOM, True), (RANDOM, False), *((name, name in PADDED) for name in names if name != RANDOM)]
    bases: list[tuple[float, float]] = []
    for name, padded in ways:
        packs = METHODS[name](loads, limits, rows, seed)
        if name in EVENED:
            packs = even_micro_batches(packs, loads, rows, replicas)
        decoder = decoder_seconds(packs, loads, padded).reshape(-1)
        of_steps, least = _steps(decoder, rows), _steps_least(packs, loads, rows)
        tower = tower_seconds(packs, loads, replicas, assigned=name != RANDOM)
        spreads = _spread(of_steps), _spread(tower)
        if name == RANDOM:
            bases.append(spreads)
        yield {
            "spread": name, "padded": padded, "source": source, "replicas": replicas, "micro_batches": MICRO_BATCHES,
            "packs": len(packs), "decoder": round(spreads[0], 5), "tower": round(spreads[1], 5),
            "decoder_of_epoch": round(float(decoder.std() / decoder.mean()), 5), "decoder_bound": round(least, 5),
            "tower_bound": round(_units_least(packs.sums(loads.vision), rows), 5),
            "efficiency": efficiencies(_steps(decoder, rows), tower, replicas, name != RANDOM),
            "random_over": [[round(base / own, 1) for base, own in zip(of, spreads, strict=True)] for of in bases],
        }  # fmt: skip


def decoder_seconds(packs: Packs, loads: Loads, padded: bool) -> np.ndarray:
    """[packs], in operations of a sample's tokens and pairs of them, which is what plans count."""
    lengths = np.repeat(packs.maxima(loads.text), packs.counts) if padded else loads.text[packs.samples]
    found: np.ndarray = np.add.reduceat(operations(lengths), packs.starts)
    return found


def tower_seconds(packs: Packs, loads: Loads, replicas: int, assigned: bool) -> np.ndarray:
    """[steps, micro-batches × replicas] in units of the tower: of a rank and micro-batch. assigned: units of a
    micro-batch go to any rank, so that none has more than one more than another."""
    own = _steps(packs.sums(loads.vision).astype(np.float64), replicas)  # of micro-batches
    if assigned:
        totals = own.sum(axis=1, keepdims=True)
        low = np.floor(totals / replicas)
        own = low + (np.arange(replicas) < totals - low * replicas)
    return _steps(own.reshape(-1), replicas * MICRO_BATCHES)


def efficiencies(
    decoder: np.ndarray, tower: np.ndarray, replicas: int, assigned: bool
) -> dict[str, dict[float, float]]:
    """An even share of a step's work over what it takes where all devices have both parts, the mean of all steps, by
    the tower's share of the operations: with a pass of the tower a micro-batch, and with one a step. assigned: a pass
    waits for its slowest rank; else replicas wait for one another where a step ends.

    decoder, tower: [steps, micro-batches × replicas]."""
    text, units = (each.reshape(-1, MICRO_BATCHES, replicas) for each in (decoder, tower))
    found: dict[str, dict[float, float]] = {"a pass a micro-batch": {}, "one pass": {}}
    for share in SHARES:
        unit = share / (1 - share) * text.sum() / units.sum()
        vision = units * unit
        even = (text + vision).sum(axis=(1, 2)) / replicas
        each = whole = (text + vision).sum(axis=1).max(axis=1)
        if assigned:
            each = (vision.max(axis=2) + text.max(axis=2)).sum(axis=1)
            whole = unit * np.ceil(units.sum(axis=(1, 2)) / replicas) + text.sum(axis=1).max(axis=1)
        for way, took in zip(found, (each, whole), strict=True):
            found[way][share] = round(float((even / took).mean()), 4)
    return found


def least_spread(costs: np.ndarray, packs: int) -> float:
    """The least standard deviation over mean of so many packs that hold these samples: one that costs more than the
    mean of the others has a pack of its own, and the rest is even."""
    ordered, alone = np.sort(costs)[::-1], 0
    rest = float(ordered.sum())
    while alone < min(len(ordered), packs - 1) and ordered[alone] > rest / (packs - alone):
        rest -= float(ordered[alone])
        alone += 1
    of_packs = np.concatenate([ordered[:alone], np.full(packs - alone, rest / (packs - alone))])
    return float(of_packs.std() / of_packs.mean())


def _steps_least(packs: Packs, loads: Loads, rows: int) -> float:
    """The mean of what each step's own samples allow."""
    costs = operations(loads.text[packs.samples])
    ends = packs.ends[rows - 1 :: rows]
    return float(np.mean([least_spread(own, rows) for own in np.split(costs, ends)[: len(ends)]]))


def _units_least(vision: np.ndarray, rows: int) -> float:
    """The least spread of whole units over the ranks and micro-batches of a step, the mean of all steps."""
    share = _steps(vision, rows).sum(axis=1) / rows
    rest = share % 1.0
    return float((np.sqrt(rest * (1.0 - rest)) / np.maximum(share, 1e-9)).mean())


def _steps(of_packs: np.ndarray, rows: int) -> np.ndarray:
    """[steps, rows]; a last step of fewer is left out."""
    return of_packs[: len(of_packs) // rows * rows].reshape(-1, rows)


def _spread(of_steps: np.ndarray) -> float:
    """Standard deviation over mean in a step, the mean of all steps."""
    return float((of_steps.std(axis=1) / np.maximum(of_steps.mean(axis=1), 1e-9)).mean())
