"""Exact answers by kind, what chance gives, layouts whose losses are compared, and the goal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments.sight.datasets import Asked

# In 64 bits: in 32, rounding alone grows over the steps, and a mistake of its size would not be told from it.
_BOTH = ["vision.dtype=float64", "text.dtype=float64", "data.eval_datasets=[]", "training.micro_batch_size=16"]
_PIPELINED = ["training.schedule=1f1b", "training.micro_batch_size=8"]


def _part(part: str, parallelism: str, *more: str) -> list[str]:
    return [f"{part}.parallelism={parallelism}", f"{part}.num_actors=2", *(f"{part}.{one}" for one in more)]


LAYOUTS = {
    "one": _BOTH,
    "seq2-tp2": [*_BOTH, *_part("vision", "sequence", "ulysses=2"), *_part("text", "tensor", "tensor=2")],
    "text-seq2": [*_BOTH, *_part("text", "sequence", "ulysses=2")],
    "data2": [*_BOTH, *_part("vision", "data"), *_part("text", "data")],
    "pipeline2": [*_BOTH, *_part("text", "pipeline", "pipeline=2"), *_PIPELINED],
    "chain2": [
        *_BOTH, *_part("vision", "pipeline", "pipeline=2"), *_part("text", "pipeline", "pipeline=2"), *_PIPELINED,
        "cluster.chain=true",
    ],
    "ring2": [*_BOTH, *_part("vision", "sequence", "ring=2", "ulysses=1")],
}  # fmt: skip


def apart(curve: Sequence[float], other: Sequence[float]) -> float:
    """The largest relative difference of two losses of the same step."""
    return max(abs(one - two) / abs(one) for one, two in zip(curve, other, strict=True))


Shares = dict[str, float]
Row = Mapping[str, Any]
AIMED = ("shape", "colour", "place", "count")  # kinds that the goal is about
RIGHT, ABOVE_CHANCE = 0.9, 0.05  # shares
CANARIES = ("zeroed", "misplaced", "no_gradient")
ADAPTED = ("projector", "lora", "all")
LAYOUTS_AGREE = 1e-5  # relative


def by_kind(asked: Sequence[Asked], exact: Iterable[bool]) -> Shares:
    """The share of exact answers of each kind."""
    right: Counter[str] = Counter()
    for (kind, _), one in zip(asked, exact, strict=True):
        right[kind] += one
    return {kind: round(right[kind] / count, 4) for kind, count in Counter(kind for kind, _ in asked).items()}


def chances(asked: Sequence[Asked]) -> Shares:
    """By kind, the most that one and the same answer to a question gets: the share of the commonest."""
    found: Shares = {}
    for kind in dict.fromkeys(kind for kind, _ in asked):
        answers = Counter(answer for of, answer in asked if of == kind)
        found[kind] = round(max(answers.values()) / answers.total(), 4)
    return found


def missed(row: Row) -> list[str]:
    """Where a row is not what the goal wants of it, in words."""
    if row["what"] == "exported":
        return (
            [] if row["same"] == row["asked"] else [f"exported: {row['same']} of {row['asked']} answers are the same"]
        )
    if row["what"] == "layout":
        return [] if row["off"] <= LAYOUTS_AGREE else [f"{row['layout']}: losses are {row['off']:.1e} off"]
    level = {kind: chance + ABOVE_CHANCE for kind, chance in row["chance"].items()}
    canary = row["what"] in CANARIES
    found = [f"{kind} {row['right'][kind]:.0%} right" for kind in AIMED if not canary and row["right"][kind] < RIGHT]
    for which in ("right", "exchanged") if canary else ("exchanged",):
        high = [kind for kind in AIMED if row[which][kind] > level[kind] + 1e-9]
        found += [f"{kind} {row[which][kind]:.0%} {which}" for kind in high]
    return [f"seed {row['seed']}, {row['what']}: {one}" for one in found]


def goal(rows: Sequence[Row]) -> dict[str, Any]:
    """The last row: seeds that were run, what was not run of what the goal names, and what was missed."""
    of_seeds: dict[int, set[str]] = {}
    for row in rows:
        of_seeds.setdefault(row["seed"], set()).add(row["what"])
    wanted = ("scratch", "exported", *(f"renamed_{way}" for way in ADAPTED), *CANARIES)
    absent = [f"seed {seed}: {what}" for seed in range(3) for what in wanted if what not in of_seeds.get(seed, ())]
    absent += [] if any(row["what"] == "layout" for row in rows) else ["layouts"]
    found = [one for row in rows for one in missed(row)]
    return {
        "goal": "met" if not (found or absent) else "missed" if found else "open",
        "missed": found,
        "absent": absent,
    }


def sentence(row: Mapping[str, Any], rows: Sequence[Row]) -> str:
    """The result in words."""
    scratch = [one for one in rows if one["what"] == "scratch"]
    if not scratch:
        return "no training from scratch was run"
    least = min(one["right"][kind] for one in scratch for kind in AIMED)
    most = max(one["exchanged"][kind] - one["chance"][kind] for one in scratch for kind in AIMED)
    seeds = f"{len(scratch)} seed{'s' if len(scratch) > 1 else ''}"
    return (
        f"{seeds}: at least {least:.0%} exact on held-out combinations with right pictures, at most {most * 100:+.0f} "
        f"points from chance with exchanged ones; the goal is {row['goal']}"
    )
