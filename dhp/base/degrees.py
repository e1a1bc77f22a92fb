"""How many ways a stage is split along each axis of its mesh."""

from __future__ import annotations

from dataclasses import dataclass

AXES = ("data", "ring", "ulysses", "tensor")


@dataclass(frozen=True)
class Degrees:
    """Ranks along each axis; tensor ranks are consecutive. expert: so many consecutive data ranks share out the experts
    of a decoder; no axis of its own."""

    data: int = 1
    ring: int = 1
    ulysses: int = 1
    tensor: int = 1
    expert: int = 1

    @property
    def world(self) -> int:
        """All ranks."""
        return self.shards * self.tensor

    @property
    def sequence(self) -> int:
        """Ranks that share one sequence."""
        return self.ring * self.ulysses

    @property
    def shards(self) -> int:
        """How many ways the tokens are split: tensor ranks of one mesh position compute with the same ones."""
        return self.data * self.ring * self.ulysses

    @property
    def holders(self) -> int:
        """Ranks that hold all weights together: consecutive ones, the first group from rank 0 on."""
        return self.tensor * self.expert

    def by_axis(self) -> dict[str, int]:
        """Ranks along each axis, outermost first; those that share out experts are an axis inside of data, so that the
        product stays that of all ranks."""
        axes = {axis: getattr(self, axis) for axis in AXES}
        if self.expert == 1:
            return axes
        return {"data": self.data // self.expert, "expert": self.expert, **{axis: axes[axis] for axis in AXES[1:]}}

    def __str__(self) -> str:
        split = [f"{axis} {getattr(self, axis)}" for axis in AXES if getattr(self, axis) > 1]
        shared = f" (expert {self.expert})" if self.expert > 1 else ""
        return (" × ".join(split) or "one rank") + shared
