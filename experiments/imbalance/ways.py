"""What is compared, as overrides of config.yaml, and what OmniBal has of it."""

from __future__ import annotations

from typing import Any

VISION_STAGES = 2  # of config.yaml; the decoder's first stage shares the device of the last one
REPLICAS = 2
MICRO_BATCH = 4  # samples
IN_FLIGHT = 4  # micro-batches of a step and replica, as many as the chain has devices
BATCHES = {
    "random": ["data.balance=random", "data.packing=false"],
    "balanced": ["data.balance=balanced", "data.packing=true"],
}
# By size: as InternVL's own training cuts, which OmniBal calls parameter-based.
WAYS = {
    "random batches": [*BATCHES["random"], "text.partition=parameters"],
    "balanced batches": [*BATCHES["balanced"], "text.partition=parameters"],
    "balanced batches and cut": [*BATCHES["balanced"], "text.partition=exact"],
}
SOURCE = "OmniBal (arXiv 2407.20761), table 1: InternVL-Chat in four stages, random batches"
# Mean and deviation of tokens, of a forward's milliseconds, of gigabytes of a device.
PUBLISHED = {
    "between stages": {"tokens": (1400, 900), "forward_ms": (85, 93), "memory_gb": (39, 23)},
    "stage 1 over time": {"tokens": (1900, 1200), "forward_ms": (136, 155), "memory_gb": (73, 6)},
}


def overrides(way: str, steps: int) -> list[str]:
    """A run with as many micro-batches in flight as 1F1B has, whose activations are counted."""
    together = MICRO_BATCH * REPLICAS * IN_FLIGHT
    length = [f"training.batch_size={together}", f"training.max_steps={steps}"]
    return [*WAYS[way], *length, "training.schedule=1f1b", "memory.accounting=true"]


def published_rows() -> list[dict[str, Any]]:
    """The published table, in the columns of ours."""
    rows = []
    for name, columns in PUBLISHED.items():
        row: dict[str, Any] = {"row": "published", "of": name}
        for column, (mean, deviation) in columns.items():
            row |= {column: mean, f"{column}_sd": deviation, f"{column}_spread": round(deviation / mean, 3)}
        rows.append(row | {"source": SOURCE})
    return rows
