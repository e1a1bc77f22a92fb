"""Which vision replicas are near which text replica, from where the ranks of a run lie."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from dhp.base.stages import Chain, StageSpec
from dhp.cluster.cluster import RankDevice
from dhp.parallel.attention.locality import ELSEWHERE, SAME_DEVICE, SAME_NODE, Locality


def find_locality(chain: Chain, devices: Mapping[str, Sequence[RankDevice]], slack: float) -> Locality | None:
    """devices: of each stage, by rank. slack: see `Locality`. None where there is one vision replica.

    Where text is a pipeline, what counts is its first stage, which gets the embeddings.
    """
    vision, text = chain.stage("vision"), chain.of_part("text")[0]
    if vision.degrees.data == 1:
        return None
    encoders, decoders = _of_replicas(vision, devices), _of_replicas(text, devices)
    return Locality(tuple(tuple(_distance(own, other) for other in encoders) for own in decoders), slack)


def devices_as_planned(chain: Chain) -> dict[str, list[RankDevice]]:
    """Where ranks would lie on one node."""
    return {stage.name: [RankDevice(device, 0) for device in stage.devices] for stage in chain.stages}


def _of_replicas(stage: StageSpec, devices: Mapping[str, Sequence[RankDevice]]) -> list[set[RankDevice]]:
    """The devices of each data replica: data is the outermost axis of a mesh."""
    own, each = devices[stage.name], stage.degrees.world // stage.degrees.data
    return [set(own[first : first + each]) for first in range(0, len(own), each)]


def _distance(own: set[RankDevice], other: set[RankDevice]) -> int:
    if own & other:
        return SAME_DEVICE
    return SAME_NODE if {rank.node for rank in own} & {rank.node for rank in other} else ELSEWHERE
