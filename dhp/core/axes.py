"""The axes over which a stage's ranks divide work.

Meshes, groups, placement and tables of a run are derived from one record each. A pipeline divides a part into
stages instead (`dhp.core.graph`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

SAMPLES, ROW, WEIGHTS, EXPERTS = "samples", "row", "weights", "experts"


@dataclass(frozen=True)
class Axis:
    """name: its key in a part's section, and its dimension of the mesh. divides: what its ranks share.

    within: the axis of which its groups are consecutive ranks; "": it is a dimension of the mesh by itself.

    every_layer: its groups exchange several times in each layer, so that they belong on one node."""

    name: str
    divides: str
    within: str = ""
    every_layer: bool = False


AXES = (
    Axis("data", SAMPLES),
    Axis("expert", EXPERTS, within="data"),
    Axis("ring", ROW),
    Axis("ulysses", ROW, every_layer=True),
    Axis("tensor", WEIGHTS, every_layer=True),
)  # outermost first: the ranks of the last are neighbours
MESH = tuple(axis.name for axis in AXES if not axis.within)  # its dimensions
OF_ROWS = tuple(axis.name for axis in AXES if axis.divides == ROW)  # whose ranks share a row
OF_TOKENS = tuple(axis.name for axis in AXES if axis.divides in (SAMPLES, ROW))  # whose ranks hold the same weights
EVERY_LAYER = tuple(axis.name for axis in AXES if axis.every_layer)


@dataclass(frozen=True)
class Degrees:
    """Ranks along each axis. expert: so many consecutive data ranks share out the experts of a decoder."""

    data: int = 1
    ring: int = 1
    ulysses: int = 1
    tensor: int = 1
    expert: int = 1

    @classmethod
    def read(cls, degree: Callable[[str], int]) -> Degrees:
        """degree: of the axis of a name."""
        return cls(**{axis.name: degree(axis.name) for axis in AXES})

    def along(self, *names: str) -> tuple[int, ...]:
        """Degrees of some axes."""
        return tuple(getattr(self, name) for name in names)

    @property
    def world(self) -> int:
        """All ranks."""
        return prod(self.along(*MESH))

    @property
    def rows(self) -> tuple[int, int]:
        """Ranks along ring and Ulysses, which divide a row here."""
        ring, ulysses = self.along(*OF_ROWS)
        return ring, ulysses

    @property
    def sequence(self) -> int:
        """Ranks that share one sequence."""
        return prod(self.along(*OF_ROWS))

    @property
    def shards(self) -> int:
        """How many ways the tokens are split: tensor ranks of one mesh position compute with the same ones."""
        return prod(self.along(*OF_TOKENS))

    @property
    def copies(self) -> int:
        """Ranks that hold the same experts, of those that split the tokens."""
        return self.shards // prod(self.along(*(axis.name for axis in AXES if axis.divides == EXPERTS)))

    @property
    def holders(self) -> tuple[int, ...]:
        """The first ranks that hold all weights together: of the axes that divide weights all, of one within which
        experts are shared out the first neighbours, of others the first."""
        ranks = [0]
        for axis in (axis for axis in AXES if not axis.within):
            degree, parts = getattr(self, axis.name), [one.name for one in AXES if one.within == axis.name]
            held = degree if axis.divides == WEIGHTS else prod(self.along(*parts))
            ranks = [rank * degree + place for rank in ranks for place in range(held)]
        return tuple(ranks)

    @property
    def shares_experts(self) -> bool:
        """Whether ranks hold different experts."""
        return self.expert > 1

    @property
    def divided(self) -> int:
        """Axes with more than one rank."""
        return sum(degree > 1 for degree in self.along(*(axis.name for axis in AXES)))

    def by_axis(self) -> dict[str, int]:
        """Ranks along each axis, outermost first. The degree of an axis within another one divides that one's, so that
        the product stays that of all ranks; at 1 it is left out."""
        found: dict[str, int] = {}
        for axis in AXES:
            own = getattr(self, axis.name)
            if axis.within and own > 1:
                found[axis.within] //= own
            if own > 1 or not axis.within:
                found[axis.name] = own
        return found

    def __str__(self) -> str:
        split = [f"{axis} {getattr(self, axis)}" for axis in MESH if getattr(self, axis) > 1]
        within = [f"{a.name} {getattr(self, a.name)}" for a in AXES if a.within and getattr(self, a.name) > 1]
        return (" × ".join(split) or "one rank") + "".join(f" ({text})" for text in within)
