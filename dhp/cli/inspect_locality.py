"""Costs and gains of encoding images near the text replica that needs them: a table of `inspect data`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from dhp.batch.assign_images import SAME_DEVICE, Locality, assign_longest_first, assign_near
from dhp.data.balance.packs import Loads, Packs

MICRO_BATCHES = 200  # of the epoch that are looked at
SLACKS = (0.0, 0.01, 0.05)


@dataclass(frozen=True)
class EncoderShards:
    """Figures of some micro-batches: the share of image tokens on their replica's own devices, the work of the busiest
    vision replica over the most even way's (mean), and pairs of ranks that exchange something (mean)."""

    near: float
    busiest: float
    pairs: float


def locality_table(packs: Packs, loads: Loads, locality: Locality | None) -> list[str]:
    """Lines to print; none where there is one vision replica. A sample's image tokens count as one image."""
    if locality is None:
        return []
    slacks = sorted({*SLACKS, locality.slack})
    batches = list(_micro_batches(packs, loads, len(locality.distances)))
    if not batches:
        return []
    lines = [f"\n{'data.locality_slack':20} {'near':>8} {'busiest':>9} {'pairs':>8}   of {len(batches)} micro-batches"]
    for slack in slacks:
        found = encoder_shards(batches, replace(locality, slack=slack))
        chosen = " *" if slack == locality.slack else ""
        lines.append(f"{f'{slack:g}' + chosen:20} {found.near:8.1%} {found.busiest:9.4f} {found.pairs:8.1f}")
    return [
        *lines,
        f"  {'near':16}image tokens on devices of the text replica that needs them",
        f"  {'busiest':16}work of the busiest vision replica over the most even way's",
        f"  {'pairs':16}of ranks that exchange something in a micro-batch",
    ]


def encoder_shards(batches: Sequence[tuple[Sequence[float], Sequence[int]]], locality: Locality) -> EncoderShards:
    """batches: of each micro-batch, the cost of each image and the text replica that needs it."""
    near = total = 0.0
    busiest, pairs = [], []
    for costs, replicas in batches:
        even = assign_longest_first(costs, len(locality.distances[0]))
        assigned = assign_near(costs, replicas, even, locality)
        most = max(sum(costs[i] for i in own) for own in even)
        busiest.append(max(sum(costs[i] for i in own) for own in assigned) / most)
        at = {index: vision for vision, own in enumerate(assigned) for index in own}
        near += sum(costs[i] for i, v in at.items() if locality.distances[replicas[i]][v] == SAME_DEVICE)
        total += sum(costs)
        pairs.append(len({(v, replicas[i]) for i, v in at.items()}))
    return EncoderShards(near / total, float(np.mean(busiest)), float(np.mean(pairs)))


def _micro_batches(packs: Packs, loads: Loads, replicas: int) -> Iterator[tuple[list[float], list[int]]]:
    for first in range(0, min(len(packs) - replicas + 1, MICRO_BATCHES * replicas), replicas):
        costs, owners = [], []
        for replica in range(replicas):
            for sample in packs.pack(first + replica):
                if loads.vision[sample]:
                    costs.append(float(loads.vision[sample]))
                    owners.append(replica)
        if costs:
            yield costs, owners
