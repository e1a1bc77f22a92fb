"""Layouts that a run's losses are compared in."""

from __future__ import annotations

from collections.abc import Sequence

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
        *_BOTH,
        *_part("vision", "pipeline", "pipeline=2"),
        *_part("text", "pipeline", "pipeline=2"),
        *_PIPELINED,
        "cluster.chain=true",
    ],
    "ring2": [*_BOTH, *_part("vision", "sequence", "ring=2", "ulysses=1")],
}


def apart(curve: Sequence[float], other: Sequence[float]) -> float:
    """The largest relative difference of two losses of the same step."""
    return max(abs(one - two) / abs(one) for one, two in zip(curve, other, strict=True))
