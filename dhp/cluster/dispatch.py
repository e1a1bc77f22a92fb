"""How the arguments of a call spread over the ranks of a group: declared, never guessed from lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PerRank:
    """One value for each rank, in rank order. Any other argument goes to every rank as it is."""

    values: tuple[Any, ...]


def per_rank(values: Any) -> PerRank:
    """`PerRank` of any iterable."""
    return PerRank(tuple(values))


def spread(arguments: tuple[Any, ...], ranks: int) -> list[tuple[Any, ...]]:
    """The argument tuple of each rank.

    Raises ValueError when a PerRank holds another number of values than there are ranks.
    """
    for argument in arguments:
        if isinstance(argument, PerRank) and len(argument.values) != ranks:
            raise ValueError(f"{len(argument.values)} values for {ranks} ranks")
    return [tuple(a.values[rank] if isinstance(a, PerRank) else a for a in arguments) for rank in range(ranks)]
