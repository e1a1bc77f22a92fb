"""The two parts as the driver sees them: which ref goes to which rank. Refs pass through, nothing is opened here.

Letters: v vision rank, d text data replica, t tensor rank, m micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from dhp.cluster.dispatch import PerRank, per_rank
from dhp.parallel.comm.mesh import Degrees
from dhp.step.schedule import TEXT, VISION, Backward, Forward

Ref = Any  # an ObjectRef, or the value itself where a group runs in the test process


class Group(Protocol):
    """What a part needs of its actors."""

    size: int

    def execute_all_async(self, method: str, *arguments: Any, returns: int | PerRank = 1) -> list[list[Ref]]:
        """Call `method` on every rank; for each rank the refs of its `returns` results."""


@dataclass(frozen=True)
class Batch:
    """Refs of one step's data: info, vision[m][v], text[m][d]."""

    info: Ref
    vision: Sequence[Sequence[Ref]]
    text: Sequence[Sequence[Ref]]


@dataclass
class Refs:
    """What the step has produced so far: embeddings[m][v][d] on the way there, gradients[m][d][v] on the way back."""

    batch: Batch
    embeddings: dict[int, list[list[Ref]]] = field(default_factory=dict)
    gradients: dict[int, list[list[Ref]]] = field(default_factory=dict)


class VisionPart:
    """Tower and projector: each place of the mesh but for tensor gets its own windows and hands over its own rows.

    Tensor ranks of one place get the same windows; the first of them answers for all.
    """

    def __init__(self, group: Group, degrees: Degrees, text_replicas: int):
        self.group = group
        self._tensor = degrees.tensor
        self._text_replicas = text_replicas

    def run(self, action: Forward | Backward, refs: Refs) -> None:
        """Submit one action on all ranks."""
        m = action.micro_batch
        works = _repeated(refs.batch.vision[m], self._tensor)
        if isinstance(action, Forward):
            leads = _leads(self.group.size, self._tensor)
            counts = per_rank(self._text_replicas if lead else 0 for lead in leads)
            returned = self.group.execute_all_async("forward_step", m, works, per_rank(leads), returns=counts)
            refs.embeddings[m] = returned[:: self._tensor]
        else:
            gradients = [_repeated(of_replica, self._tensor) for of_replica in refs.gradients.pop(m)]
            self.group.execute_all_async("backward_step", m, works, *gradients, returns=0)


class TextPart:
    """Decoder and head: tensor ranks of a replica get the same rows; the first of them answers for all."""

    def __init__(self, group: Group, degrees: Degrees, vision_ranks: int, micro_batches: int):
        """vision_ranks: those that hand over embeddings, one for each place of the vision mesh but for tensor."""
        self.group = group
        self._tensor = degrees.tensor
        self._vision_ranks = vision_ranks
        self._micro_batches = micro_batches

    def run(self, action: Forward | Backward, refs: Refs) -> None:
        """Submit one action on all ranks."""
        m = action.micro_batch
        if isinstance(action, Forward):
            embeddings = refs.embeddings.pop(m)
            rows = _repeated(refs.batch.text[m], self._tensor)
            by_vision_rank = [_repeated(of_rank, self._tensor) for of_rank in embeddings]
            self.group.execute_all_async("forward_step", m, rows, *by_vision_rank, returns=0)
        else:
            leads = _leads(self.group.size, self._tensor)
            returned = self.group.execute_all_async(
                "backward_step",
                m,
                m == self._micro_batches - 1,
                per_rank(leads),
                returns=per_rank(self._vision_ranks if lead else 0 for lead in leads),
            )
            refs.gradients[m] = returned[:: self._tensor]

    def leaders(self, of_ranks: Sequence[Ref]) -> list[Ref]:
        """The values of each replica's first tensor rank."""
        return list(of_ranks[:: self._tensor])


def _repeated(values: Sequence[Ref], tensor: int) -> PerRank:
    """One value for each group of tensor ranks, given to each of them."""
    return per_rank(value for value in values for _ in range(tensor))


def _leads(size: int, tensor: int) -> list[bool]:
    return [rank % tensor == 0 for rank in range(size)]


Parts = dict[int, VisionPart | TextPart]


def make_parts(vision: Group, text: Group, vision_degrees: Degrees, text_degrees: Degrees, micro_batches: int) -> Parts:
    """Both parts by their number in the schedule."""
    return {
        VISION: VisionPart(vision, vision_degrees, text_degrees.data),
        TEXT: TextPart(text, text_degrees, vision.size // vision_degrees.tensor, micro_batches),
    }
