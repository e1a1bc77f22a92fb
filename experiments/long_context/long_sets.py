"""Samplers on sets with long samples, with the columns of OmniBal (Yao et al. 2025, supplement, A.8 and table 7).

Both sets are made: the long one as its Long-2.5W is described (25,000 samples of up to 32,768 tokens and 80 pictures),
the mixed one with a few samples of up to 20 pictures among short ones. Replicas share a row over eight sequence ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from dhp.batch.assign_images import ImageWork, shard_images
from dhp.batch.row_shards import choose_groups, divide_all, grouped_plan
from dhp.data.balance.methods import choose_method
from dhp.data.balance.metrics import QUADRATIC_TOKENS, dist_ratio, measure_balance
from dhp.data.balance.packs import Limits, Loads, Packs
from dhp.parallel.attention.shard_plan import ShardPlan
from experiments.balance.columns import row_columns
from experiments.baselines import PADDED

RANKS, REPLICAS = 8, 4
TILE = 256  # tokens of a picture
WINDOW, WINDOWS = 64, 16  # patches of a window of a tower, windows of a picture: where it may be cut
ROWS = 400  # of which rows the pictures of a rank are counted


@dataclass(frozen=True)
class LongSet:
    """A made set: samples, the share of long ones, pictures of these, most tokens, samples of a batch that is not
    balanced. published: of the same row of the paper's table, before and after."""

    name: str
    samples: int
    long_share: float
    pictures: tuple[int, int]
    tokens: int
    batch: int
    published: dict[str, Any]

    def loads(self) -> Loads:
        """Pictures and tokens of each sample."""
        rng = np.random.default_rng(0)
        few, most = self.pictures
        long = rng.random(self.samples) < self.long_share
        pictures = np.where(long, rng.integers(few, most + 1, self.samples), rng.integers(1, 5, self.samples))
        words = np.exp(rng.normal(5.5, 0.7, self.samples)).clip(16, 1024)
        room = self.tokens - pictures * TILE
        words = np.where(long, rng.uniform(0, 1, self.samples) * room, np.minimum(words, room)).astype(np.int64)
        return Loads(pictures.astype(np.int64), pictures * TILE + np.maximum(words, 16).clip(max=room))


SETS = (
    LongSet(
        "long", 25_000, 1.0, (20, 80), 32_768, 1,
        {"random": {"ave_bs": 1, "pad": 0, "sp_ratio": 0.22, "gpu_days": 23.2},
         "balanced": {"ave_bs": 1, "pad": 0, "dist_vision": 0.03, "dist_text": 0.02, "sp_ratio": 0, "gpu_days": 19.6}},
    ),
    LongSet(
        "mixed", 100_000, 0.03, (5, 20), 8_192, 8,
        {"random": {"ave_bs": 8, "pad": 0.417, "dist_vision": 0.27, "dist_text": 0.24, "gpu_days": 36.2},
         "balanced": {"ave_bs": 10.3, "pad": 0, "dist_vision": 0.03, "dist_text": 0.07, "gpu_days": 18.7}},
    ),
)  # fmt: skip
WAYS = ("random", "length_group", "isf", "balanced", "balanced, long ones apart")


def measure(_: str, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line for each set and way; time_to_even and the longest row as `experiments.balance` has them."""
    for made in SETS:
        loads = made.loads()
        for way in WAYS:
            packs = make_packs(way, made, loads)
            padded = way in PADDED
            found = measure_balance(packs, loads, REPLICAS, padded, dispatched=way.startswith("balanced"))
            by_token, evenly = sp_ratios(packs, loads, way)
            yield {
                "set": made.name,
                "way": way,
                "ave_bs": round(len(loads) / len(packs), 2),
                "pad": round(found.pad, 4),
                "dist_vision": round(found.dist_vision, 4),
                "dist_text": round(found.dist_text, 4),
                "sp_ratio_by_token": round(by_token, 4),
                "sp_ratio": round(evenly, 4),
                **row_columns(packs, loads, REPLICAS, padded),
                "published": made.published.get(way),
            }


def make_packs(way: str, made: LongSet, loads: Loads) -> Packs:
    """Rows as a sampler makes them."""
    method, _, apart = way.partition(", ")
    limits = Limits(vision=made.pictures[1], text=made.tokens, samples=made.batch)
    return choose_method(method, made.tokens // RANKS + 1 if apart else None)(loads, limits, REPLICAS, 0)


def sp_ratios(packs: Packs, loads: Loads, way: str) -> tuple[float, float]:
    """SP-Ratio, the DistRatio of pictures among the ranks that share a row, in the mean of some rows: where each rank
    encodes the pictures whose tokens it has, and where they are shared out first."""
    rng = np.random.default_rng(1)
    by_token, evenly = [], []
    for number in range(0, len(packs), max(1, len(packs) // ROWS)):
        plan = shared_row(packs, loads, number, way)
        pictures = loads.vision[packs.pack(number)]
        starts = [places(n, int(of), rng) for n, of in zip(plan.lengths, pictures, strict=True)]
        by_token.append(dist_ratio(_held(plan, starts)))
        windows = shard_images([ImageWork(0, (WINDOW,) * WINDOWS, (WINDOW * WINDOWS,))] * pictures.sum(), 1, RANKS)[0]
        evenly.append(dist_ratio(np.array([sum(one.last - one.first for one in pieces) for pieces in windows])))
    return float(np.mean(by_token)), float(np.mean(evenly))


def places(tokens: int, pictures: int, rng: np.random.Generator) -> np.ndarray:
    """Where the pictures of a sample begin, anywhere among its words and one behind another [pictures]."""
    words = tokens - pictures * TILE
    return np.sort(rng.integers(0, words + 1, pictures)) + np.arange(pictures) * TILE


def shared_row(packs: Packs, loads: Loads, number: int, way: str) -> ShardPlan:
    """Which rank has what of a row: of balanced rows short samples stay whole where ranks are even with them."""
    lengths = loads.text[packs.pack(number)].tolist()
    groups = divide_all(lengths, RANKS, 1)
    if way.startswith("balanced"):
        groups = choose_groups(lengths, RANKS, 1, float(QUADRATIC_TOKENS))
    return grouped_plan(lengths, RANKS, 1, groups)


def _held(plan: ShardPlan, starts: list[np.ndarray]) -> np.ndarray:
    """How many pictures begin in what each rank has [ranks]. starts: of each sample's pictures."""
    counts = []
    for (shard,) in plan.shards:
        inside = [(starts[p.segment] >= p.first) & (starts[p.segment] < p.end) for p in shard]
        counts.append(sum(int(one.sum()) for one in inside))
    return np.array(counts)
