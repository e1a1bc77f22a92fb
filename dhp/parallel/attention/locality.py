"""Images on the device or node of the text replica that needs them, as far as balance allows. Pure numbers.

What goes to another node crosses the network twice, there and back as gradients; and each pair of ranks that exchanges
anything is an argument of a call in every micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SAME_DEVICE, SAME_NODE, ELSEWHERE = 0, 1, 2


@dataclass(frozen=True)
class Locality:
    """Distances between vision and text replicas, and the imbalance allowed for nearness.

    distances: from each text replica to each vision replica, one of the three above. slack: the busiest vision replica
    may have more to do by this fraction than under the most even assignment known.
    """

    distances: tuple[tuple[int, ...], ...]
    slack: float

    def nearest(self, replica: int) -> list[int]:
        """The vision replicas that are as near to a text replica as any."""
        row = self.distances[replica]
        return [vision for vision, distance in enumerate(row) if distance == min(row)]


def assign_near(
    costs: Sequence[float], replicas: Sequence[int], even: Sequence[Sequence[int]], locality: Locality
) -> list[list[int]]:
    """Indices of images for each vision replica.

    replicas: the text replica of each image. even: an assignment whose busiest replica sets the limit, with the slack.

    Each image begins at the least loaded of the nearest vision replicas, costliest first. Replicas beyond the limit
    then give images to the nearest ones that have room. If some remain beyond it, the answer is `even`.
    """
    limit = (1 + locality.slack) * max((sum(costs[i] for i in indices) for indices in even), default=0.0)
    loads, assigned = [0.0] * len(even), [list[int]() for _ in even]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        home = min(locality.nearest(replicas[index]), key=lambda v: (loads[v], v))
        loads[home] += costs[index]
        assigned[home].append(index)
    fits = _relieve(costs, replicas, assigned, loads, limit, locality)
    return [sorted(indices) for indices in (assigned if fits else even)]


def _relieve(
    costs: Sequence[float],
    replicas: Sequence[int],
    assigned: list[list[int]],
    loads: list[float],
    limit: float,
    locality: Locality,
) -> bool:
    """Move images away from vision replicas that have more than `limit`. Whether none has in the end."""
    for _ in range(2 * len(costs)):
        fullest = max(range(len(loads)), key=lambda v: (loads[v], -v))
        if loads[fullest] <= limit:
            return True
        move = _best_move(costs, replicas, assigned[fullest], fullest, loads, limit, locality)
        if move is None:
            return False
        index, target = move
        assigned[fullest].remove(index)
        assigned[target].append(index)
        loads[fullest] -= costs[index]
        loads[target] += costs[index]
    return max(loads, default=0.0) <= limit


def _best_move(
    costs: Sequence[float],
    replicas: Sequence[int],
    own: Sequence[int],
    fullest: int,
    loads: Sequence[float],
    limit: float,
    locality: Locality,
) -> tuple[int, int] | None:
    """An image of the fullest vision replica, and a replica where it fits: the image that leaves least to be moved,
    then the nearest replica."""
    excess = loads[fullest] - limit
    found: list[tuple[float, int, float, int, int]] = []
    for index in own:
        distances = locality.distances[replicas[index]]
        for target, load in enumerate(loads):
            if target != fullest and load + costs[index] <= limit:
                # Images that are as large as the excess end it at once; of these the smallest keeps most at home.
                left = max(0.0, excess - costs[index])
                surplus = max(0.0, costs[index] - excess)
                found.append((left, distances[target], surplus + load, index, target))
    if not found:
        return None
    *_, index, target = min(found)
    return index, target
