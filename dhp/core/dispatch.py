"""Distributes a call's arguments over a group's ranks, as declared."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PerRank:
    """One value for each rank, in rank order. Any other argument goes to every rank as it is."""

    values: tuple[Any, ...]


@dataclass(frozen=True)
class Several:
    """For each rank, in rank order, any number of arguments, which follow one another in its call."""

    values: tuple[tuple[Any, ...], ...]


@dataclass(frozen=True)
class Call:
    """A method of the engine, for every rank of a group.

    method: by name or as a method. arguments: as `spread` takes them. returns: how many results each rank has. sends:
    of each rank, by result, on which way (`dhp.core.graph.StageGraph.ways`) and to which ranks it goes; None: not
    known."""

    method: str | Callable[..., Any]
    arguments: tuple[Any, ...]
    returns: int | PerRank = 1
    sends: PerRank | None = None

    @property
    def name(self) -> str:
        """The method's."""
        return self.method if isinstance(self.method, str) else self.method.__name__


def per_rank(values: Iterable[Any]) -> PerRank:
    """`PerRank` of any iterable."""
    return PerRank(tuple(values))


def several(values: Iterable[Iterable[Any]]) -> Several:
    """`Several` of any iterable of iterables."""
    return Several(tuple(tuple(of_rank) for of_rank in values))


def spread(arguments: tuple[Any, ...], ranks: int) -> list[tuple[Any, ...]]:
    """The argument tuple of each rank.

    Raises ValueError when a PerRank or a Several is for another number of ranks."""
    for argument in arguments:
        if isinstance(argument, (PerRank, Several)) and len(argument.values) != ranks:
            raise ValueError(f"{len(argument.values)} values for {ranks} ranks")
    return [tuple(value for a in arguments for value in _for_rank(a, rank)) for rank in range(ranks)]


def _for_rank(argument: Any, rank: int) -> tuple[Any, ...]:
    if isinstance(argument, Several):
        return argument.values[rank]
    return (argument.values[rank],) if isinstance(argument, PerRank) else (argument,)
