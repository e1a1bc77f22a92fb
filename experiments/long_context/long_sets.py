"""Samplers on sets with long samples, with the columns of OmniBal (Yao et al. 2025, supplement, A.8 and table 7).

Both sets are made: the long one as its Long-2.5W is described (25,000 samples of up to 32,768 tokens and 80 pictures),
the mixed one with a few samples of up to 20 pictures among short ones. Replicas share a row over eight sequence ranks.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from dhp.batch.assign_images import ImageWork, shard_images
from dhp.batch.row_shards import choose_groups, divide_all, grouped_plan
from dhp.data.balance.methods import choose_method
from dhp.data.balance.packs import QUADRATIC_TOKENS, Limits, Loads, Packs, dist_ratio, measure_balance
from dhp.parallel.attention.shard_plan import ShardPlan, is_whole
from experiments.balance.sets import row_columns
from experiments.baselines import PADDED
from experiments.published.canvas import SIDE, TOP, Canvas

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
        {"balanced": {"ave_bs": 3.9, "pad": 0, "dist_vision": 0.03, "dist_text": 0.08, "sp_ratio": 0.025,
                      "gpu_days": 38.6}},
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
            found = measure_balance(packs, loads, REPLICAS, padded)
            by_token, evenly = sp_ratios(packs, loads, way)
            yield {
                "set": made.name, "way": way, "ave_bs": round(len(loads) / len(packs), 2), "pad": round(found.pad, 4),
                "dist_vision": round(found.dist_vision, 4), "dist_assigned": round(found.dist_assigned, 4),
                "dist_text": round(found.dist_text, 4),
                "sp_ratio_by_token": round(by_token, 4), "sp_ratio": round(evenly, 4),
                **row_columns(packs, loads, REPLICAS, padded), "published": made.published.get(way),
            }  # fmt: skip


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


COLOURS = {  # red, green and blue of each kind of tokens
    "of long samples": (0, 90, 156),
    "of short ones, divided": (209, 73, 91),
    "of short ones, whole": (190, 205, 190),
}
STEPS = 24


def kinds_of(plan: ShardPlan, share: int) -> np.ndarray:
    """Of each rank's tokens the shares of long samples, of short ones that are divided and of whole ones [ranks, 3].
    share: tokens up to which a sample is short."""
    found = np.zeros((len(plan.shards), len(COLOURS)))
    for rank, (shard,) in enumerate(plan.shards):
        for piece in shard:
            long, whole = plan.lengths[piece.segment] > share, is_whole(piece, plan.lengths)
            found[rank, 0 if long else 1 + whole] += piece.count
    return found / np.maximum(found.sum(axis=1, keepdims=True), 1)


def draw(ways: dict[str, Packs], loads: Loads, replicas: int, ranks: int, crossover: float, path: Path) -> None:
    """Write a PNG: a panel a way, a column a step from the middle of its epoch, a line a rank of each replica."""
    canvas, share = Canvas(len(ways)), int(loads.text.max()) // ranks
    canvas.text(canvas.left(0), 8, f"what {replicas} replicas of {ranks} ranks have, downwards, in {STEPS} steps")
    for at, (name, colour) in enumerate(COLOURS.items()):
        canvas.dot(canvas.left(0) + 10 + at * 170, 30, _hexadecimal(colour))
        canvas.text(canvas.left(0) + 20 + at * 170, 23, name)

    def shared(packs: Packs, number: int) -> ShardPlan:
        lengths = loads.text[packs.pack(number)].tolist()
        return grouped_plan(lengths, ranks, 1, choose_groups(lengths, ranks, 1, crossover))

    for panel, (way, packs) in enumerate(ways.items()):
        canvas.text(canvas.left(panel), TOP - 18, way)
        first = (len(packs) // replicas // 2) * replicas
        _panel(canvas, canvas.left(panel), replicas, lambda n: kinds_of(shared(packs, first + n), share))  # noqa: B023
    canvas.save(path)


def _panel(canvas: Canvas, left: float, replicas: int, kinds: Callable[[int], np.ndarray]) -> None:
    """kinds: of the row of that number [ranks, 3]."""
    wide, high = SIDE / STEPS, SIDE / replicas
    for step, replica in product(range(STEPS), range(replicas)):
        found = kinds(step * replicas + replica)
        for rank, shares in enumerate(found):
            line = high / len(found)
            top, gap = TOP + replica * high + rank * line, 2 if rank == len(found) - 1 else 0
            colour = _hexadecimal(shares @ np.array(list(COLOURS.values())))
            canvas.box(left + step * wide, top, wide - 1, line - gap, colour)


def _hexadecimal(colour: Iterable[float]) -> str:
    return "#" + "".join(f"{int(value):02x}" for value in colour)


SAMPLES, LONG_SHARE, MOST = 25_000, 0.125, 32_768
SHARE = MOST // RANKS  # what one rank holds
CROSSOVER = 36_864.0  # 6 × hidden 6,144
SOME_ROWS = 400  # of which rows the division is worked out
SAMPLERS: Sequence[tuple[str, int | None]] = (("random", None), ("balanced", None), ("balanced", SHARE + 1))


def measure_sampler(model: str, given: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A line for each way to make rows and to divide them.

    one: every sample over all ranks. step: so where any row of a step has a sample that no rank could hold; else none.
    auto: each sample by itself. With --plot a picture of balanced rows, with long samples in any and apart."""
    loads = _mixed_lengths()
    limits = Limits(vision=MOST, text=MOST, samples=1)
    drawn: dict[str, Packs] = {}
    for name, long in SAMPLERS:
        packs = choose_method(name, long)(loads, limits, REPLICAS, 0)
        if name == "balanced":
            drawn["long ones apart" if long else "long ones in any row"] = packs
        balance = measure_balance(packs, loads, REPLICAS, padded=False)
        yield {
            "way": name if long is None else f"{name}, long ones apart", "rows": len(packs),
            "dist_text": round(balance.dist_text, 4), "dist_flops": round(balance.dist_flops, 4),
            "sp_ratio_one": round(_of_rows(packs, loads, auto=False)[0], 4),
            "sp_ratio_step": round(_of_steps(packs, loads), 4),
            "sp_ratio_auto": round(_of_rows(packs, loads, auto=True)[0], 4),
            "busiest_rank_auto": round(_of_rows(packs, loads, auto=True)[1], 4),
        }  # fmt: skip
    if given.plot is not None:
        draw(drawn, loads, REPLICAS, RANKS, CROSSOVER, given.plot)


def _mixed_lengths() -> Loads:
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
    for number in range(0, len(packs), max(1, len(packs) // SOME_ROWS)):
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
