"""Which rank lies on which node: consecutive ranks side by side, the innermost groups of the mesh inside a node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, permutations, product
from math import gcd, prod

from dhp.base.stages import part_of
from dhp.cluster.placement.reservation import Slot

Slots = Mapping[str, Sequence[Slot]]  # of each stage, by rank
AxisDegrees = Mapping[
    str, int
]  # ranks by axis of a stage's mesh, outermost axis first: the last one's ranks are neighbours

TENSOR = "tensor"
INNER = (TENSOR, "ulysses")  # axes whose groups talk several times in every layer
SHOWN_GROUPS = 3  # groups that a warning names


@dataclass(frozen=True)
class Straddle:
    """Groups of one axis that lie across nodes.

    block: consecutive ranks that hold a group. groups: how many groups the axis has. across: the ranks of each group
    that lies across nodes. shares: devices of the stage on each node.
    """

    stage: str
    axis: str
    degree: int
    block: int
    groups: int
    across: tuple[tuple[int, ...], ...]
    shares: tuple[int, ...]


@dataclass(frozen=True)
class _Stretch:
    """Consecutive devices of stages that share some of them, and the sizes of the blocks to keep together."""

    first: int
    count: int
    sizes: tuple[int, ...]


def map_ranks(slots: Slots, node_of: Sequence[int], degrees: Mapping[str, AxisDegrees]) -> dict[str, tuple[Slot, ...]]:
    """The slots with bundles exchanged, so that as few groups as possible lie across nodes, innermost axes first.

    slots: as planned, rank after rank on bundle after bundle; node_of: the node of each bundle, numbered in the order
    that nodes are to be filled in. Ranks that shared a bundle still do. The same input gives the same order.
    """
    by_node = _bundles_by_node(slots, node_of)

    def cost(order: tuple[int, ...]) -> tuple[int, ...]:
        nodes = [node_of[bundle] for bundle in order]
        return (*_across(slots, nodes, degrees), sum(a != b for a, b in pairwise(nodes)))

    best = min(_orders(_stretches(slots, degrees), by_node), key=cost)
    return {stage: tuple(replace(s, bundle=best[s.bundle]) for s in of_stage) for stage, of_stage in slots.items()}


def find_straddles(slots: Slots, node_of: Sequence[int], degrees: Mapping[str, AxisDegrees]) -> list[Straddle]:
    """For each stage and each axis of `INNER`, the groups that lie across nodes, if there are any."""
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
                found.append(Straddle(stage, axis, degree, block, len(groups), across, shares))
    return found


def describe_straddle(straddle: Straddle, names: Sequence[str]) -> str:
    """One paragraph: which groups lie across which nodes, and what would keep them inside. names: node by rank."""
    key, inside = _key(straddle), _inside(straddle)
    smaller = f"set {key}={inside}, or " if inside > 1 else ""
    return (
        f"{_which(straddle, names)}. Every layer of these ranks talks over the network, which is correct but slow. The "
        f"nodes give {straddle.stage} {_shares(straddle)} devices: {smaller}use a multiple of {straddle.block} devices "
        "of each node"
    )


def refuse_straddle(straddle: Straddle, degrees: AxisDegrees, names: Sequence[str]) -> str:
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
    found: list[tuple[int, int, set[int]]] = []
    for stage, of_stage in sorted(slots.items(), key=lambda item: item[1][0].bundle):
        first, end = of_stage[0].bundle, of_stage[-1].bundle + 1
        blocks = {degrees[stage][axis] * _stride(degrees[stage], axis) for axis in degrees[stage]} | {end - first}
        if found and first < found[-1][1]:
            begun, ended, known = found[-1]
            found[-1] = (begun, max(ended, end), known | blocks)
        else:
            found.append((first, end, blocks))
    return [
        _Stretch(first, end - first, tuple(sorted((b for b in blocks if 1 < b < end - first), reverse=True)))
        for first, end, blocks in found
    ]


def _orders(stretches: Sequence[_Stretch], by_node: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """Orders worth comparing: node after node, and for each choice of block sizes whole blocks before what is left."""
    yield tuple(bundle for bundles in by_node for bundle in bundles)
    for sequence in permutations(stretches):
        for chosen in product(*(_subsets(stretch.sizes) for stretch in sequence)):
            left = [list(bundles) for bundles in by_node]
            filled = {s.first: _fill(s.count, sizes, left) for s, sizes in zip(sequence, chosen, strict=True)}
            yield tuple(bundle for first in sorted(filled) for bundle in filled[first])


def _subsets(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
    return [chosen for length in range(len(sizes) + 1) for chosen in combinations(sizes, length)]


def _fill(count: int, sizes: Sequence[int], left: list[list[int]]) -> list[int]:
    """Take `count` bundles from the nodes: as many whole blocks of the largest size as there are, then smaller ones."""
    taken: list[int] = []
    for size in (*sizes, 1):
        for node in left:
            while len(node) >= size and len(taken) + size <= count:
                taken += node[:size]
                del node[:size]
    return taken


def _across(slots: Slots, nodes: Sequence[int], degrees: Mapping[str, AxisDegrees]) -> list[int]:
    """How many groups lie across nodes, for each axis but the outermost, innermost first."""
    counts: dict[str, int] = {}
    for stage, of_stage in slots.items():
        own = [nodes[slot.bundle] for slot in of_stage]
        for axis in list(degrees[stage])[:0:-1]:
            groups = ranks_by_group(degrees[stage], axis)
            counts[axis] = counts.get(axis, 0) + sum(len({own[rank] for rank in group}) > 1 for group in groups)
    return list(counts.values())


def _key(straddle: Straddle) -> str:
    """The configuration's key of the degree: all stages of a part have it in common."""
    return f"{part_of(straddle.stage)}.{straddle.axis}"


def _whose(straddle: Straddle) -> str:
    return f" of {straddle.stage}" if "." in straddle.stage else ""


def _inside(straddle: Straddle) -> int:
    """The largest degree, of those that divide the one asked for, whose groups would each lie inside a node."""
    stride, fitting = straddle.block // straddle.degree, gcd(straddle.block, *straddle.shares)
    return fitting // stride if fitting % stride == 0 else 1


def _shares(straddle: Straddle) -> str:
    return ", ".join(str(share) for share in straddle.shares)


def _which(straddle: Straddle, names: Sequence[str]) -> str:
    groups = "; ".join(_group(ranks, names) for ranks in straddle.across[:SHOWN_GROUPS])
    more = len(straddle.across) - SHOWN_GROUPS
    return (
        f"{len(straddle.across)} of {straddle.groups} groups of {_key(straddle)}={straddle.degree}{_whose(straddle)} "
        f"lie across nodes: {groups}{f'; and {more} more' if more > 0 else ''}"
    )


def _group(ranks: Sequence[int], names: Sequence[str]) -> str:
    nodes = list(dict.fromkeys(names[rank] for rank in ranks))
    return f"ranks {', '.join(str(rank) for rank in ranks)} on {' and '.join(nodes)}"
