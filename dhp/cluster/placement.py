"""Which device each actor gets: one bundle a device, shared by both parts when they are collocated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from dhp.errors import ConfigError

Resources = dict[str, float]


@dataclass(frozen=True)
class Slot:
    """One actor's place: its bundle, and its share of the bundle's resources."""

    bundle: int
    cpus: float
    gpus: float


@dataclass(frozen=True)
class PlacementPlan:
    """The bundles to ask for, and the slots of each part by rank. Printable, comparable, made without Ray."""

    bundles: tuple[Resources, ...]
    slots: Mapping[str, tuple[Slot, ...]]
    gpus_per_bundle: float


def plan_placement(actors: Mapping[str, int], collocate: bool, gpus: float) -> PlacementPlan:
    """Lay out parts of the given numbers of actors over `gpus` GPUs (0: CPU only).

    Collocated, rank r of every part shares bundle r; apart, each actor has a bundle of its own. With fewer GPUs
    than bundles, bundles share GPUs evenly.
    """
    count = max(actors.values()) if collocate else sum(actors.values())
    share = _gpu_share(count, gpus)
    bundle: Resources = {"CPU": 1.0} | ({"GPU": share} if share else {})
    slots, first = {}, 0
    for part, ranks in actors.items():
        sharing = len(actors) if collocate else 1
        slots[part] = tuple(Slot(first + rank, 1.0 / sharing, share / sharing) for rank in range(ranks))
        first += 0 if collocate else ranks
    return PlacementPlan((bundle,) * count, slots, share)


def _gpu_share(bundles: int, gpus: float) -> float:
    if gpus <= 0:
        return 0.0
    per_gpu = -(-bundles // int(gpus))  # bundles on the fullest GPU
    return 1.0 / per_gpu


def reserve(plan: PlacementPlan, timeout_s: float) -> PlacementGroup:
    """Reserve the plan's bundles. Raises ConfigError, naming what is registered and free, after `timeout_s`."""
    group = placement_group(list(plan.bundles), strategy="PACK")
    ready, _ = ray.wait([group.ready()], timeout=timeout_s)
    if ready:
        return group
    remove_placement_group(group)
    raise ConfigError(
        f"the cluster did not give {_sum(plan.bundles)} within cluster.start_timeout_s={timeout_s:g} s. "
        f"Registered: {_shown(ray.cluster_resources())}; free: {_shown(ray.available_resources())}. "
        "Ask for fewer actors, set cluster.collocate=true, or add nodes"
    )


def _sum(bundles: Sequence[Resources]) -> str:
    total: Resources = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            total[name] = total.get(name, 0.0) + amount
    return f"{_shown(total)} in {len(bundles)} bundles"


def _shown(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{resources.get(name, 0.0):g} {name}" for name in ("CPU", "GPU"))
