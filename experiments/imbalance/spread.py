"""What is compared, as overrides of config.yaml, and what OmniBal has of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dhp.observe.ranks import RankLine

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


TEXT = "text"
MIB = 2**20
Row = dict[str, Any]


def device_of(stage: str) -> int:
    """Of `vision.1` or `text.0`: devices of a chain are numbered along it, and one of them has both."""
    part, _, number = stage.partition(".")
    return int(number or 0) + (VISION_STAGES - 1 if part == TEXT else 0)


def forward_ms(forwards: Sequence[Row]) -> np.ndarray:
    """[micro-batches, devices, replicas]: milliseconds, stages of a device summed. forwards: lines that ranks wrote,
    each rank's in their order. Raises ValueError where ranks wrote of different numbers of micro-batches."""
    of_rank: dict[tuple[str, int], list[float]] = {}
    for one in forwards:
        of_rank.setdefault((one["stage"], one["rank"]), []).append(1000 * one["seconds"])
    counts = {len(own) for own in of_rank.values()}
    if len(counts) != 1:
        raise ValueError(f"ranks wrote of {sorted(counts)} forwards, and each has as many as the others")
    devices, replicas = (1 + max(map(by, of_rank)) for by in (lambda key: device_of(key[0]), lambda key: key[1]))
    found = np.zeros((*counts, devices, replicas))
    for (stage, rank), own in of_rank.items():
        found[:, device_of(stage), rank] += own
    return found


def activation_mib(lines: Sequence[RankLine]) -> np.ndarray:
    """[steps, devices, replicas]: the most that was kept for backward, stages of a device summed. Raises ValueError
    where a rank measured none."""
    found = []
    for line in lines:
        devices: dict[int, np.ndarray] = {}
        for stage, of in line.activation_bytes.items():
            if None in of:
                raise ValueError(f"step {line.step}: a rank of {stage} measured no activations")
            devices[device_of(stage)] = devices.get(device_of(stage), 0) + np.array(of, dtype=float) / MIB
        found.append(np.stack([devices[device] for device in sorted(devices)]))
    return np.stack(found)


def device_tokens(patches: np.ndarray, tokens: np.ndarray, devices: int) -> np.ndarray:
    """[micro-batches, devices, replicas]: patches on devices with layers of the tower, tokens on those with the
    decoder's, both on the one with both. patches, tokens: [micro-batches, replicas]."""
    own = [(device < VISION_STAGES, device >= VISION_STAGES - 1) for device in range(devices)]
    return np.stack([patches * tower + tokens * decoder for tower, decoder in own], axis=1)


def spreads(columns: Mapping[str, np.ndarray]) -> Iterator[Row]:
    """Rows in the columns of OmniBal's table 1. columns: by name, [micro-batches or steps, devices, replicas].

    A stage's deviation is over time and replicas. Between stages it is that of one replica's stages at one time, in the
    mean of all of these.
    """
    devices = next(iter(columns.values())).shape[1]
    for device in range(devices):
        row: Row = {"row": "over time", "stage": device + 1}
        for name, values in columns.items():
            row |= _column(name, float(values[:, device].mean()), float(values[:, device].std()))
        yield row
    row = {"row": "between stages"}
    for name, values in columns.items():
        row |= _column(name, float(values.mean(axis=1).mean()), float(values.std(axis=1).mean()))
    yield row


def _column(name: str, mean: float, deviation: float) -> Row:
    return {name: round(mean, 2), f"{name}_sd": round(deviation, 2), f"{name}_spread": round(deviation / mean, 3)}


def moments(columns: Mapping[str, np.ndarray]) -> Iterator[Row]:
    """Rows in the panels of OmniBal's figures 1 and 2: the first and the last micro-batch or step that counts, each
    replica, all stages, and their deviation."""
    replicas = next(iter(columns.values())).shape[2]
    for moment, at in (("T-0", 0), ("T-1", -1)):
        for replica in range(replicas):
            row: Row = {"row": "moment", "moment": moment, "replica": f"DP-{replica}"}
            for name, values in columns.items():
                own = values[at, :, replica]
                row |= {name: [round(float(one), 2) for one in own], f"{name}_sd": round(float(own.std()), 2)}
            yield row
