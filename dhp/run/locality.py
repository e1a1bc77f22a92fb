"""Distances between replicas of encoders and of the decoder, from the devices of a run's ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dhp.base.stages import StageGraph, StageSpec
from dhp.cluster.cluster import RankDevice
from dhp.parallel.attention.locality import ELSEWHERE, SAME_DEVICE, SAME_NODE, Locality


def find_localities(
    graph: StageGraph, devices: Mapping[str, Sequence[RankDevice]], slack: float
) -> dict[str, Locality]:
    """By encoder, of those with a choice of replicas.

    devices: of each stage, by rank. slack: see `Locality`. Where the part that an encoder sends to is a pipeline, what
    counts is the first of its stages that gets anything.
    """
    found: dict[str, Locality] = {}
    for edge in graph.edges:
        source, target = graph.stage(edge.source.stage), graph.stage(edge.target.stage)
        if source.part == target.part or source.part in found or source.degrees.data == 1:
            continue
        senders, receivers = _of_replicas(source, devices), _of_replicas(target, devices)
        found[source.part] = Locality(tuple(tuple(_distance(own, o) for o in senders) for own in receivers), slack)
    return found


def devices_as_planned(graph: StageGraph) -> dict[str, list[RankDevice]]:
    """The devices of ranks on one node."""
    return {stage.name: [RankDevice(device, 0) for device in stage.devices] for stage in graph.stages}


def _of_replicas(stage: StageSpec, devices: Mapping[str, Sequence[RankDevice]]) -> list[set[RankDevice]]:
    """The devices of each data replica: data is the outermost axis of a mesh."""
    own, each = devices[stage.name], stage.degrees.world // stage.degrees.data
    return [set(own[first : first + each]) for first in range(0, len(own), each)]


def _distance(own: set[RankDevice], other: set[RankDevice]) -> int:
    if own & other:
        return SAME_DEVICE
    return SAME_NODE if {rank.node for rank in own} & {rank.node for rank in other} else ELSEWHERE
