"""The nodes of a reservation's bundles, and so which ranks share a node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dhp.base.stages import part_of
from dhp.cluster.placement.nodes import ClusterNode
from dhp.cluster.placement.reservation import Slot

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
