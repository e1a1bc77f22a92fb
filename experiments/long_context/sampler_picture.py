"""A picture of what each rank has in some steps, with long samples in any row and in rows of their own: the sampler
that OmniBal (Yao et al. 2025) draws in its supplement, figure 2."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path

import numpy as np

from dhp.batch.row_shards import choose_groups, grouped_plan
from dhp.data.balance.packs import Loads, Packs
from dhp.parallel.attention.shard_plan import ShardPlan, is_whole
from experiments.published.canvas import SIDE, TOP, Canvas

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
