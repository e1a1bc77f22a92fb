"""Reserves devices for actors, and says which ranks share a node."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from dhp.cluster.placement.nodes import ClusterNode, Resources, describe_shortage, free_bundles, read_nodes
from dhp.core.errors import TooFewDevices
from dhp.core.graph import part_of

RAY_UNITS = 10_000  # Ray counts resources in ten-thousandths
PATIENCE_S = 5.0  # how long a reservation may take before a line says what it waits for


@dataclass(frozen=True)
class Slot:
    """The place of one actor: its bundle, and its share of the bundle's resources."""

    bundle: int
    cpus: float
    gpus: float


@dataclass(frozen=True)
class PlacementPlan:
    """The bundles to ask for, and the slots of each stage by rank. Printable, comparable, made without Ray."""

    bundles: tuple[Resources, ...]
    slots: Mapping[str, tuple[Slot, ...]]
    gpus_per_bundle: float


def plan_placement(devices: Mapping[str, range], gpus: float, shares: bool = True) -> PlacementPlan:
    """Lay out stages over `gpus` GPUs (0: CPU only). devices: of each stage, the logical devices of its ranks.
    shares: several bundles may share a GPU where there are too few.

    Each logical device is a bundle, and each rank gets as much of it as if all had as many ranks as the fullest. With
    fewer GPUs than bundles, bundles share GPUs evenly.
    """
    used = [device for of_stage in devices.values() for device in of_stage]
    count, sharing = max(used) + 1, max(used.count(device) for device in set(used))
    cpu, gpu = _fraction(1, sharing), _gpu_fraction(count, gpus if shares or not gpus else max(gpus, count), sharing)
    bundle: Resources = {"CPU": cpu * sharing} | ({"GPU": gpu * sharing} if gpu else {})
    slots = {stage: tuple(Slot(device, cpu, gpu) for device in of_stage) for stage, of_stage in devices.items()}
    return PlacementPlan((bundle,) * count, slots, gpu * sharing)


def _gpu_fraction(bundles: int, gpus: float, sharing: int) -> float:
    """One actor's share of a GPU."""
    if gpus < 1:
        return 0.0
    per_gpu = -(-bundles // int(gpus))  # bundles on the fullest GPU
    return _fraction(1, per_gpu * sharing)


def _fraction(whole: int, among: int) -> float:
    """`whole` / `among`, rounded down to what Ray counts in: rounded up, the last actor would never find room."""
    return (whole * RAY_UNITS // among) / RAY_UNITS


def reserve(plan: PlacementPlan, timeout_s: float, key: str = "cluster.start_timeout_s") -> PlacementGroup:
    """Reserve the plan's bundles, on as few nodes as Ray can; says on stderr what it waits for when that takes a while.

    Raises TooFewDevices, naming what is missing and what each node has, after `timeout_s`, which `key` says.
    """
    group = placement_group(list(plan.bundles), strategy="PACK")
    created = group.ready()
    patience = min(PATIENCE_S, timeout_s)
    ready, _ = ray.wait([created], timeout=patience)
    if not ready and patience < timeout_s:
        print(f"waiting up to {timeout_s:g} s for devices. {_shortage(plan)}", file=sys.stderr, flush=True)
        ready, _ = ray.wait([created], timeout=timeout_s - patience)
    if ready:
        return group
    why = _shortage(plan)
    remove_placement_group(group)
    there = free_bundles(plan.bundles[0], read_nodes())
    raise TooFewDevices(f"the cluster did not give the run its devices within {key}={timeout_s:g} s. {why}", there)


def wait_for_gpus(timeout_s: float, key: str) -> float:
    """GPUs of a cluster that has none, once it has some. Raises TooFewDevices after `timeout_s`, which `key` says."""
    print(f"waiting up to {timeout_s:g} s for GPUs, of which the cluster has none", file=sys.stderr, flush=True)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        time.sleep(min(1.0, timeout_s))
        if gpus := sum(node.total.get("GPU", 0.0) for node in read_nodes()):
            return gpus
    raise TooFewDevices(f"the cluster has had no GPU for {key}={timeout_s:g} s: the nodes with GPUs are gone", 0)


def bundle_nodes(group: PlacementGroup) -> list[str]:
    """The id of the node of each bundle of a reservation that was granted, by bundle."""
    by_bundle = placement_group_table(group)["bundles_to_node_id"]
    return [by_bundle[bundle] for bundle in sorted(by_bundle)]


def _shortage(plan: PlacementPlan) -> str:
    ranks = sum(map(len, plan.slots.values()))
    apart = len(plan.slots) > 1 and len(plan.bundles) == ranks
    return describe_shortage(plan.bundles[0], len(plan.bundles), apart, read_nodes())


LISTED_NODES = 8  # in the line about a run's start


@dataclass(frozen=True)
class Topology:
    """The nodes of a run, and which bundle is on which.

    nodes: those that hold bundles, in the order of `read_nodes`. of_bundle: for each bundle, the index of its node.
    """

    nodes: tuple[ClusterNode, ...]
    of_bundle: tuple[int, ...]

    def names(self, slots: Sequence[Slot]) -> list[str]:
        """The node of each rank, as a person knows it."""
        return [self.nodes[self.of_bundle[slot.bundle]].name for slot in slots]

    def only(self, node_id: str) -> bool:
        """Whether everything is on that node."""
        return [node.id for node in self.nodes] == [node_id]

    def threads(self, slots: Mapping[str, Sequence[Slot]]) -> int:
        """CPU threads an actor that every node has for its ranks of the larger part: parts take turns."""
        shares = []
        for number, node in enumerate(self.nodes):
            ranks: dict[str, int] = {}
            for stage, of_stage in slots.items():
                ranks[part_of(stage)] = ranks.get(part_of(stage), 0) + len(self._ranks(of_stage, number))
            shares.append(int(node.total.get("CPU", 0.0)) // max(ranks.values()))
        return max(1, min(shares))

    def describe(self, slots: Mapping[str, Sequence[Slot]]) -> str:
        """`10.0.0.5 (vision 0-3, text 0-3), 10.0.0.6 (…)`: the ranks on each node."""
        names = []
        for number, node in enumerate(self.nodes[:LISTED_NODES]):
            ranks = ((stage, self._ranks(of_stage, number)) for stage, of_stage in slots.items())
            names.append(f"{node.name} ({', '.join(f'{stage} {_ranges(own)}' for stage, own in ranks if own)})")
        more = [f"and {len(self.nodes) - LISTED_NODES} more"] if len(self.nodes) > LISTED_NODES else []
        return ", ".join([*names, *more])

    def gpus(self) -> str:
        """`10.0.0.5 has 8 GPUs, 10.0.0.6 …`: what each node has, used or not."""
        names = [f"{node.name} has {node.total.get('GPU', 0.0):g} GPUs" for node in self.nodes[:LISTED_NODES]]
        more = [f"and {len(self.nodes) - LISTED_NODES} more"] if len(self.nodes) > LISTED_NODES else []
        return ", ".join([*names, *more])

    def _ranks(self, slots: Sequence[Slot], node: int) -> list[int]:
        return [rank for rank, slot in enumerate(slots) if self.of_bundle[slot.bundle] == node]


def find_topology(node_ids: Sequence[str], nodes: Sequence[ClusterNode]) -> Topology:
    """The topology of a reservation. node_ids: the node of each bundle. nodes: all nodes of the cluster, in order."""
    holding = tuple(node for node in nodes if node.id in node_ids)
    numbers = {node.id: number for number, node in enumerate(holding)}
    return Topology(holding, tuple(numbers[node_id] for node_id in node_ids))


def _ranges(ranks: Sequence[int]) -> str:
    """`0-3+6`: runs of neighbours."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][-1] == rank - 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return "+".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
