"""Prefetching of the next step's data by the encoders' ranks, during the step that runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dhp.base.stages import StageGraph
from dhp.cluster.actor_group import ActorGroup
from dhp.cluster.elsewhere import RemoteValue
from dhp.config.parts import DECODER

Work = Mapping[str, Sequence[Sequence[Any]]]  # refs by part, [micro-batch][shard]


def look_ahead(groups: Mapping[str, ActorGroup], graph: StageGraph, work: Work) -> frozenset[Any]:
    """Let each rank of an encoder fetch its shard's work of all micro-batches; the refs that are fetched. The
    decoder's work is small: what is large of it comes from the encoders."""
    fetched: set[Any] = set()
    for stage in graph.stages:
        if stage.part == DECODER or stage.part not in work:
            continue
        tensor = stage.degrees.tensor
        shards = [[micro_batch[shard] for micro_batch in work[stage.part]] for shard in range(stage.degrees.shards)]
        groups[stage.name].look_ahead([own for own in shards for _ in range(tensor)])
        fetched |= {ref for own in shards for ref in own}
    return frozenset(fetched)


def named_elsewhere(work: Work, fetched: frozenset[Any]) -> dict[str, list[list[Any]]]:
    """The work, in which what ranks have fetched themselves is referred to by `RemoteValue`, not sent once more."""
    return {
        part: [[RemoteValue(ref) if ref in fetched else ref for ref in shards] for shards in micro_batches]
        for part, micro_batches in work.items()
    }
