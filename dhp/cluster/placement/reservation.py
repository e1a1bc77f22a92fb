"""Reserves devices for actors, and maps ranks to nodes."""

import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from math import gcd, prod

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from dhp.cluster.placement.nodes import ClusterNode, Resources, describe_shortage, free_bundles, read_nodes
from dhp.core.axes import EVERY_LAYER
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
    """The bundles to ask for, and the slots of each stage by rank. Printable, comparable, made without Ray.

    bundles_per_gpu: on the fullest GPU; 0 on CPUs."""

    bundles: tuple[Resources, ...]
    slots: Mapping[str, tuple[Slot, ...]]
    bundles_per_gpu: int

    @property
    def gpus(self) -> int:
        """GPUs that the bundles take; 0 on CPUs."""
        return -(-len(self.bundles) // self.bundles_per_gpu) if self.bundles_per_gpu else 0


def plan_placement(devices: Mapping[str, range], gpus: float, shares: bool = True) -> PlacementPlan:
    """Lay out stages over `gpus` GPUs (0: CPU only). devices: of each stage, the logical devices of its ranks.
    shares: several bundles may share a GPU where there are too few.

    Each logical device is a bundle, and each rank gets as much of it as if all had as many ranks as the fullest. With
    fewer GPUs than bundles, bundles share GPUs evenly."""
    used = [device for of_stage in devices.values() for device in of_stage]
    count, sharing = max(used) + 1, max(used.count(device) for device in set(used))
    there = int(gpus if shares or not gpus else max(gpus, count))
    per_gpu = -(-count // there) if there else 0
    cpu, gpu = _fraction(1, sharing), _fraction(1, per_gpu * sharing) if per_gpu else 0.0
    bundle: Resources = {"CPU": cpu * sharing} | ({"GPU": gpu * sharing} if gpu else {})
    slots = {stage: tuple(Slot(device, cpu, gpu) for device in of_stage) for stage, of_stage in devices.items()}
    return PlacementPlan((bundle,) * count, slots, per_gpu)


def beside(stage: str, slots: Mapping[str, Sequence[Slot]]) -> tuple[tuple[str, ...], ...]:
    """Of each rank of a stage, the ranks of other stages in the same bundle, as `text rank 1`."""
    others = [(name, of_stage) for name, of_stage in slots.items() if name != stage]
    return tuple(
        tuple(f"{name} rank {rank}" for name, of in others for rank, slot in enumerate(of) if slot.bundle == own.bundle)
        for own in slots[stage]
    )


def _fraction(whole: int, among: int) -> float:
    """`whole` / `among`, rounded down to what Ray counts in: rounded up, the last actor would never find room."""
    return (whole * RAY_UNITS // among) / RAY_UNITS


def reserve(plan: PlacementPlan, timeout_s: float, key: str = "cluster.start_timeout_s") -> PlacementGroup:
    """Reserve the plan's bundles, on as few nodes as Ray can; says on stderr what it waits for when that takes a while.

    Raises TooFewDevices, naming what is missing and what each node has, after `timeout_s`, which `key` says."""
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

    nodes: those that hold bundles, in the order of `read_nodes`. of_bundle: for each bundle, the index of its node."""

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


Slots = Mapping[str, Sequence[Slot]]  # of each stage, by rank
AxisDegrees = Mapping[
    str, int
]  # ranks by axis of a stage's mesh, outermost axis first: the last one's ranks are neighbours

TENSOR = "tensor"
INNER = EVERY_LAYER[::-1]
KEPT = 64  # ways to place the first stages that are followed further
SHOWN_GROUPS = 3  # groups that a warning names


@dataclass(frozen=True)
class CrossNodeGroup:
    """Groups of one axis that span nodes.

    block: consecutive ranks that hold a group. groups: how many groups the axis has. across: the ranks of each group
    that spans nodes. shares: devices of the stage on each node."""

    stage: str
    axis: str
    degree: int
    block: int
    groups: int
    across: tuple[tuple[int, ...], ...]
    shares: tuple[int, ...]


@dataclass(frozen=True)
class _Stretch:
    """Consecutive devices of stages that share some of them.

    sizes: of the blocks to keep together, largest first. stages: of each, the places of its ranks within the stretch
    and its degrees by axis. Stretches that differ in `first` alone are alike."""

    first: int
    count: int
    sizes: tuple[int, ...]
    stages: tuple[tuple[range, tuple[tuple[str, int], ...]], ...]


@dataclass(frozen=True)
class _Placed:
    """Some stretches on nodes. nodes: of each device, by the first device of its stretch, in the order of placing.
    left: free devices of each node. across: groups that span nodes, by axis, innermost first."""

    nodes: Mapping[int, tuple[int, ...]]
    left: tuple[int, ...]
    across: tuple[int, ...]

    @cached_property
    def cost(self) -> tuple[int, ...]:
        """Less is better: groups across nodes, then neighbours on different nodes."""
        of_device = {first + place: node for first, own in self.nodes.items() for place, node in enumerate(own)}
        return (*self.across, sum(of_device.get(device + 1, node) != node for device, node in of_device.items()))


def map_ranks(slots: Slots, node_of: Sequence[int], degrees: Mapping[str, AxisDegrees]) -> dict[str, tuple[Slot, ...]]:
    """The slots with bundles exchanged, so that as few groups as possible span nodes, innermost axes first.

    slots: as planned, rank after rank on bundle after bundle; node_of: the node of each bundle, numbered in the order
    that nodes are to be filled in. Ranks that shared a bundle still do. The same input gives the same order."""
    by_node = _bundles_by_node(slots, node_of)
    placed = _place(slots, [len(bundles) for bundles in by_node], degrees)
    free = [iter(bundles) for bundles in by_node]
    best = {first + place: next(free[node]) for first, own in placed.nodes.items() for place, node in enumerate(own)}
    return {stage: tuple(replace(s, bundle=best[s.bundle]) for s in of_stage) for stage, of_stage in slots.items()}


def find_straddles(slots: Slots, node_of: Sequence[int], degrees: Mapping[str, AxisDegrees]) -> list[CrossNodeGroup]:
    """For each stage and each axis of `INNER`, the groups that span nodes, if there are any."""
    found = []
    for stage, of_stage in slots.items():
        nodes = [node_of[slot.bundle] for slot in of_stage]
        shares = tuple(nodes.count(node) for node in sorted(set(nodes)))
        for axis in INNER:
            groups = ranks_by_group(degrees[stage], axis)
            across = tuple(group for group in groups if len({nodes[rank] for rank in group}) > 1)
            if across:
                degree = degrees[stage][axis]
                block = degree * _stride(degrees[stage], axis)
                found.append(CrossNodeGroup(stage, axis, degree, block, len(groups), across, shares))
    return found


def describe_straddle(straddle: CrossNodeGroup, names: Sequence[str]) -> str:
    """One paragraph: which groups span which nodes, and what would keep them inside. names: node by rank."""
    key, inside = _key(straddle), _inside(straddle)
    smaller = f"set {key}={inside}, or " if inside > 1 else ""
    return (
        f"{_which(straddle, names)}. Every layer of these ranks talks over the network, which is correct but slow. The "
        f"nodes give {straddle.stage} {_shares(straddle)} devices: {smaller}use a multiple of {straddle.block} devices "
        "of each node"
    )


def refuse_straddle(straddle: CrossNodeGroup, degrees: AxisDegrees, names: Sequence[str]) -> str:
    """One paragraph of an error about a tensor group on GPUs: which groups, how the part is split, what would do."""
    key, stage = _key(straddle), straddle.stage
    split = ", ".join(f"{axis} {degree}" for axis, degree in degrees.items())
    return (
        f"{_which(straddle, names)}. {stage}, split by {split}, would all-reduce several times in every layer between "
        f"nodes, which takes GPUs longer than computing. The nodes have {_shares(straddle)} ranks of "
        f"{stage}: set {key}={_inside(straddle)}, or use a multiple of {straddle.block} GPUs of each node; weights "
        f"that are then too large for a GPU are cut further by {part_of(stage)}.zero_stage"
    )


def ranks_by_group(degrees: AxisDegrees, axis: str) -> list[tuple[int, ...]]:
    """The ranks of each group of that axis; each group differs from the others in some other axis."""
    degree, stride = degrees[axis], _stride(degrees, axis)
    firsts = (rank for rank in range(prod(degrees.values())) if rank // stride % degree == 0)
    return [tuple(first + number * stride for number in range(degree)) for first in firsts]


def _stride(degrees: AxisDegrees, axis: str) -> int:
    """Ranks from one member of the axis to the next: what the axes inside it multiply to."""
    axes = list(degrees)
    return prod(degrees[inner] for inner in axes[axes.index(axis) + 1 :])


def _bundles_by_node(slots: Slots, node_of: Sequence[int]) -> list[list[int]]:
    """The bundles of each node, in their own order, which is that of the node's GPUs."""
    bundles = sorted({slot.bundle for of_stage in slots.values() for slot in of_stage})
    return [[bundle for bundle in bundles if node_of[bundle] == node] for node in sorted(set(node_of))]


def _stretches(slots: Slots, degrees: Mapping[str, AxisDegrees]) -> list[_Stretch]:
    """Runs of bundles that no stage reaches across, with the blocks of the stages on each."""
    found: list[tuple[int, int, list[str]]] = []
    for stage, of_stage in sorted(slots.items(), key=lambda item: item[1][0].bundle):
        first, end = of_stage[0].bundle, of_stage[-1].bundle + 1
        if found and first < found[-1][1]:
            begun, ended, stages = found[-1]
            found[-1] = (begun, max(ended, end), [*stages, stage])
        else:
            found.append((first, end, [stage]))
    return [_stretch(slots, degrees, *found_one) for found_one in found]


def _stretch(slots: Slots, degrees: Mapping[str, AxisDegrees], first: int, end: int, names: Sequence[str]) -> _Stretch:
    blocks = {degrees[name][axis] * _stride(degrees[name], axis) for name in names for axis in degrees[name]}
    blocks |= {len(slots[name]) for name in names}
    sizes = tuple(sorted((size for size in blocks if 1 < size <= end - first), reverse=True))
    places = [range(slots[name][0].bundle - first, slots[name][-1].bundle + 1 - first) for name in names]
    stages = tuple((own, tuple(degrees[name].items())) for own, name in zip(places, names, strict=True))
    return _Stretch(first, end - first, sizes, stages)


def _place(slots: Slots, free: Sequence[int], degrees: Mapping[str, AxisDegrees]) -> _Placed:
    """Stretch after stretch, in each order of those that differ, with each choice of block sizes kept whole.

    What has placed the same stretches and left the same devices can only go on alike: the best of them goes on, and of
    all only the `KEPT` best, so that the time grows with the stages and not with their orders."""
    axes = tuple(dict.fromkeys(axis for stage in slots for axis in list(degrees[stage])[:0:-1]))
    stretches = _stretches(slots, degrees)
    reached = [_Placed({}, tuple(free), (0,) * len(axes))]
    for _ in stretches:
        best: dict[tuple[frozenset[int], tuple[int, ...]], _Placed] = {}
        for placed in reached:
            for further in _next(placed, stretches, axes):
                key = frozenset(further.nodes), further.left
                if key not in best or further.cost < best[key].cost:
                    best[key] = further
        reached = sorted(best.values(), key=lambda placed: placed.cost)[:KEPT]
    return _exchange(reached[0], stretches)


def _exchange(placed: _Placed, stretches: Sequence[_Stretch]) -> _Placed:
    """With nodes exchanged between stretches that are alike, for as long as more neighbours share a node then."""
    pairs = [(a.first, b.first) for a, b in combinations(stretches, 2) if replace(a, first=b.first) == b]
    while pairs:
        nodes = placed.nodes
        others = [replace(placed, nodes={**nodes, a: nodes[b], b: nodes[a]}) for a, b in pairs if nodes[a] != nodes[b]]
        best = min([placed, *others], key=lambda one: one.cost)
        if best is placed:
            break
        placed = best
    return placed


def _next(placed: _Placed, stretches: Sequence[_Stretch], axes: Sequence[str]) -> Iterator[_Placed]:
    """One stretch more: the first of those that are alike, with each choice of block sizes."""
    waiting: dict[_Stretch, _Stretch] = {}
    for stretch in stretches:
        if stretch.first not in placed.nodes:
            waiting.setdefault(replace(stretch, first=0), stretch)
    for stretch in waiting.values():
        for nodes in dict.fromkeys(_fill(stretch.count, sizes, placed.left) for sizes in _subsets(stretch.sizes)):
            left = tuple(count - nodes.count(node) for node, count in enumerate(placed.left))
            added = _across(stretch, nodes)
            across = tuple(known + added.get(axis, 0) for axis, known in zip(axes, placed.across, strict=True))
            yield _Placed({**placed.nodes, stretch.first: nodes}, left, across)


def _subsets(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [chosen for length in range(len(sizes) + 1) for chosen in combinations(sizes, length)]


def _fill(count: int, sizes: Sequence[int], free: Sequence[int]) -> tuple[int, ...]:
    """The nodes of `count` devices: as many whole blocks of the largest size as there are, then smaller ones."""
    taken: list[int] = []
    left = list(free)
    for size in (*sizes, 1):
        for node in range(len(left)):
            blocks = min(left[node], count - len(taken)) // size
            taken += [node] * (blocks * size)
            left[node] -= blocks * size
    return tuple(taken)


def _across(stretch: _Stretch, nodes: Sequence[int]) -> Counter[str]:
    """The number of groups that span nodes, for each axis but the outermost of its stage."""
    counts: Counter[str] = Counter()
    for places, axes in stretch.stages:
        degrees, own = dict(axes), nodes[places.start : places.stop]
        for axis in list(degrees)[1:]:
            counts[axis] += sum(len({own[rank] for rank in group}) > 1 for group in ranks_by_group(degrees, axis))
    return counts


def _key(straddle: CrossNodeGroup) -> str:
    """The configuration's key of the degree: all stages of a part have it in common."""
    return f"{part_of(straddle.stage)}.{straddle.axis}"


def _whose(straddle: CrossNodeGroup) -> str:
    return f" of {straddle.stage}" if "." in straddle.stage else ""


def _inside(straddle: CrossNodeGroup) -> int:
    """The largest degree, of those that divide the one asked for, whose groups would each be inside a node."""
    stride, fitting = straddle.block // straddle.degree, gcd(straddle.block, *straddle.shares)
    return fitting // stride if fitting % stride == 0 else 1


def _shares(straddle: CrossNodeGroup) -> str:
    return ", ".join(str(share) for share in straddle.shares)


def _which(straddle: CrossNodeGroup, names: Sequence[str]) -> str:
    groups = "; ".join(_group(ranks, names) for ranks in straddle.across[:SHOWN_GROUPS])
    more = len(straddle.across) - SHOWN_GROUPS
    return (
        f"{len(straddle.across)} of {straddle.groups} groups of {_key(straddle)}={straddle.degree}{_whose(straddle)} "
        f"lie across nodes: {groups}{f'; and {more} more' if more > 0 else ''}"
    )


def _group(ranks: Sequence[int], names: Sequence[str]) -> str:
    nodes = list(dict.fromkeys(names[rank] for rank in ranks))
    return f"ranks {', '.join(str(rank) for rank in ranks)} on {' and '.join(nodes)}"
