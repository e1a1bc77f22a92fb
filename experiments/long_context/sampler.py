"""Long samples and short ones: how much is divided among ranks without need, and how even steps are.

Lengths are synthetic, 25,000 samples of up to 32,768 tokens, as many as the long-context set of OmniBal (Yao et al.
2025), whose files are not public: most short, one in eight long. A row is shared by eight ranks.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from dhp.batch.row_shards import choose_groups, divide_all, grouped_plan
from dhp.data.balance.methods import choose_method
from dhp.data.balance.packs import Limits, Loads, Packs, measure_balance
from dhp.parallel.attention.shard_plan import is_whole
from experiments.long_context.sampler_picture import draw

SAMPLES, LONG_SHARE, MOST = 25_000, 0.125, 32_768
RANKS, REPLICAS = 8, 4
SHARE = MOST // RANKS  # what one rank holds
CROSSOVER = 36_864.0  # 6 × hidden 6,144
ROWS = 400  # of which rows the division is worked out
WAYS: Sequence[tuple[str, int | None]] = (("random", None), ("balanced", None), ("balanced", SHARE + 1))


def measure(model: str, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line for each way to make rows and to divide them.

    one: every sample over all ranks. step: so where any row of a step has a sample that no rank could hold; else none.
    auto: each sample by itself. With --plot a picture of balanced rows, with long samples in any and apart.
    """
    loads = _lengths()
    limits = Limits(vision=MOST, text=MOST, samples=1)
    drawn: dict[str, Packs] = {}
    for name, long in WAYS:
        packs = choose_method(name, long)(loads, limits, REPLICAS, 0)
        if name == "balanced":
            drawn["long ones apart" if long else "long ones in any row"] = packs
        balance = measure_balance(packs, loads, REPLICAS, padded=False, dispatched=True)
        yield {
            "way": name if long is None else f"{name}, long ones apart",
            "rows": len(packs),
            "dist_text": round(balance.dist_text, 4),
            "dist_flops": round(balance.dist_flops, 4),
            "sp_ratio_one": round(_of_rows(packs, loads, auto=False)[0], 4),
            "sp_ratio_step": round(_of_steps(packs, loads), 4),
            "sp_ratio_auto": round(_of_rows(packs, loads, auto=True)[0], 4),
            "busiest_rank_auto": round(_of_rows(packs, loads, auto=True)[1], 4),
        }
    if given.plot is not None:
        draw(drawn, loads, REPLICAS, RANKS, CROSSOVER, given.plot)


def _lengths() -> Loads:
    rng = np.random.default_rng(0)
    short = np.exp(rng.normal(6.4, 0.7, SAMPLES)).clip(32, SHARE).astype(np.int64)
    long = rng.uniform(SHARE + 1, MOST, SAMPLES).astype(np.int64)
    text = np.where(rng.random(SAMPLES) < LONG_SHARE, long, short)
    return Loads((text * 0.8).astype(np.int64), text)


def _of_steps(packs: Packs, loads: Loads) -> float:
    """The share of all tokens that are in short samples of steps with a long one."""
    longest = packs.maxima(loads.text)
    steps = np.arange(len(packs)) // REPLICAS
    divided = np.isin(steps, np.unique(steps[longest > SHARE]))
    short = np.where(loads.text <= SHARE, loads.text, 0)
    return float(packs.sums(short)[divided].sum() / loads.text.sum())


def _of_rows(packs: Packs, loads: Loads, auto: bool) -> tuple[float, float]:
    """The same where each sample may be divided by itself, and the cost of a row's busiest rank to the mean, of some
    rows."""
    divided, tokens, most = 0, 0, []
    for number in range(0, len(packs), max(1, len(packs) // ROWS)):
        lengths = loads.text[packs.pack(number)].tolist()
        make = choose_groups(lengths, RANKS, 1, CROSSOVER) if auto else divide_all(lengths, RANKS, 1)
        plan = grouped_plan(lengths, RANKS, 1, make)
        held = [piece for (shard,) in plan.shards for piece in shard]
        shared = {piece.segment for piece in held if not is_whole(piece, plan.lengths)}
        divided += sum(lengths[sample] for sample in shared if lengths[sample] <= SHARE)
        tokens += sum(lengths)
        costs = [n * (1 + n / CROSSOVER) for n in lengths]
        ranks = [sum(costs[p.segment] * p.count / lengths[p.segment] for p in shard) for (shard,) in plan.shards]
        most.append(max(ranks) * RANKS / sum(ranks))
    return divided / tokens, float(np.mean(most))
