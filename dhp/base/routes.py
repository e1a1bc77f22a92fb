"""Which shards send rows to which along an edge in one micro-batch; small values sent with the data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Route:
    """pairs: (shard of the source, shard of the target) wherever there are rows to send, sorted.

    A shard is a position of the stage's mesh but for tensor: see `dhp.base.degrees.Degrees.shards`.
    """

    pairs: tuple[tuple[int, int], ...]

    @cached_property
    def targets(self) -> Mapping[int, tuple[int, ...]]:
        """The targets of each source that sends, in order."""
        return _grouped(self.pairs)

    @cached_property
    def sources(self) -> Mapping[int, tuple[int, ...]]:
        """The sources of each target that receives, in order."""
        return _grouped((target, source) for source, target in sorted(self.pairs))


def straight(shards: int) -> Route:
    """Each shard sends to its own counterpart: between stages of one part."""
    return Route(tuple((shard, shard) for shard in range(shards)))


def dense(sources: int, targets: int) -> Route:
    """Every shard sends to every shard."""
    return Route(tuple((source, target) for source in range(sources) for target in range(targets)))


def _grouped(pairs: Iterable[tuple[int, int]]) -> dict[int, tuple[int, ...]]:
    found: dict[int, list[int]] = {}
    for first, second in pairs:
        found.setdefault(first, []).append(second)
    return {first: tuple(seconds) for first, seconds in found.items()}
