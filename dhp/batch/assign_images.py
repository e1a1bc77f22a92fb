"""Assigns windows of images to vision ranks, by locality.

Images are independent, so replicas get whole images, and inside a replica the ranks that share a sequence get whole
segments (images, frames of a video): these need no communication at all. Only segments too large for an even share
are divided, between attention windows, into the room that the others leave. Images and segments go by cost, the
costliest first and each to the least loaded (Graham 1969): full attention makes one large image costlier than many
small ones of as many patches. A rank without work gets no pieces; `dhp.batch.shard` gives it a dummy window,
since it must take part in the collectives.

What goes to another node crosses the network twice, there and back as gradients; and each pair of ranks that exchanges
anything is an argument of a call in every micro-batch."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

TOLERANCE = 1.05  # while no rank has more than this many times the mean load, no further segment is divided


@dataclass(frozen=True)
class ImageWork:
    """An image to encode: the text replica that needs it, and the patches of its windows and of its segments.

    A segment is a consecutive range of windows that see each other in full attention."""

    replica: int
    window_lengths: tuple[int, ...]
    segment_lengths: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """Consecutive windows of one image: `image` is its index, windows `first` to `last` (exclusive)."""

    image: int
    first: int
    last: int


Pieces = tuple[Piece, ...]


def segment_cost(patches: int, crossover: float) -> float:
    """Relative cost of a segment. crossover: patches at which full attention costs as much as all the rest; inf: it
    costs nothing."""
    return patches * (1.0 + patches / crossover)


def shard_images(
    images: Sequence[ImageWork],
    replicas: int,
    ranks: int,
    crossover: float = math.inf,
    locality: Locality | None = None,
) -> list[list[Pieces]]:
    """Pieces for each vision replica and each of its sequence ranks, those of one text replica together.

    locality: which vision replicas are near which text replica; None: all alike."""
    costs = [sum(segment_cost(n, crossover) for n in image.segment_lengths) for image in images]
    by_replica = assign_longest_first(costs, replicas)
    if locality is not None:
        text = len(locality.distances)  # replicas; of several micro-batches they are counted on
        by_replica = assign_near(costs, [image.replica % text for image in images], by_replica, locality)
    return [_shard_replica(images, indices, ranks, crossover) for indices in by_replica]


def assign_longest_first(costs: Sequence[float], bins: int) -> list[list[int]]:
    """Indices for each bin, costliest first to the least loaded; each list in order."""
    loads = [0.0] * bins
    assigned: list[list[int]] = [[] for _ in range(bins)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        lightest = min(range(bins), key=lambda b: (loads[b], b))
        loads[lightest] += costs[index]
        assigned[lightest].append(index)
    return [sorted(indices) for indices in assigned]


def in_runs(assigned: Sequence[Sequence[int]], kinds: Sequence[Hashable]) -> list[list[int]]:
    """The same assignment, with items of one kind, which are interchangeable, swapped so that each bin has neighbours:
    of a video, frames that follow each other, which are decoded together."""
    left: dict[Hashable, list[int]] = {}
    for item, kind in enumerate(kinds):
        left.setdefault(kind, []).append(item)
    runs = {kind: iter(items) for kind, items in left.items()}
    return [sorted(next(runs[kinds[item]]) for item in items) for items in assigned]


def cut_in_shares(lengths: Sequence[int], shares: Sequence[float]) -> list[tuple[int, int]]:
    """Consecutive ranges of `lengths`, one for each share, with sums as near to the shares as the items allow.

    shares: of the sum, adding up to 1."""
    bounds = [0, *accumulate(lengths)]
    cuts = [0]
    for target in list(accumulate(shares))[:-1]:
        cuts.append(min(range(cuts[-1], len(bounds)), key=lambda i: abs(bounds[i] - target * bounds[-1])))
    return list(pairwise([*cuts, len(lengths)]))


def fill_to_level(loads: Sequence[float], amount: float) -> list[float]:
    """Each bin's share of `amount` so that the fullest of those that get anything is as low as possible."""
    order = sorted(loads)
    for count in range(len(order), 0, -1):
        level = (amount + sum(order[:count])) / count
        if level >= order[count - 1]:
            return [max(0.0, level - load) for load in loads]
    raise AssertionError("one bin alone always takes all")


def _shard_replica(images: Sequence[ImageWork], indices: Sequence[int], ranks: int, crossover: float) -> list[Pieces]:
    segments = [segment for index in indices for segment in _segments(images, index)]
    # What has one window cannot be divided, so it comes after all that can.
    segments.sort(key=lambda s: (s[0].last - s[0].first == 1, -segment_cost(s[1], crossover)))
    costs = [segment_cost(patches, crossover) for _, patches in segments]
    divisible = sum(piece.last - piece.first > 1 for piece, _ in segments)
    even = sum(costs) / ranks
    for divided in range(divisible + 1):
        if divided < divisible and costs[divided] > even * TOLERANCE:
            continue  # alone it would be too much for a rank
        whole = assign_longest_first(costs[divided:], ranks)
        loads = [sum(costs[divided + i] for i in of_rank) for of_rank in whole]
        extra = fill_to_level(loads, sum(costs[:divided]))
        if divided == divisible or max(map(sum, zip(loads, extra, strict=True))) <= even * TOLERANCE:
            break
    held = in_runs(whole, [(piece.image, patches) for piece, patches in segments[divided:]])
    shards = [[segments[divided + i][0] for i in of_rank] for of_rank in held]
    for shard, pieces in zip(shards, _divide(images, [s for s, _ in segments[:divided]], extra), strict=True):
        shard += pieces
    return [tuple(_join_pieces(sorted(s, key=lambda p: (images[p.image].replica, p.image, p.first)))) for s in shards]


def _segments(images: Sequence[ImageWork], index: int) -> list[tuple[Piece, int]]:
    """The windows of each segment of an image, and its patches."""
    windows = {end: number for number, end in enumerate(accumulate(images[index].window_lengths, initial=0))}
    ends = accumulate(images[index].segment_lengths, initial=0)
    return [(Piece(index, windows[a], windows[b]), b - a) for a, b in pairwise(ends)]


def _divide(images: Sequence[ImageWork], segments: Sequence[Piece], room: Sequence[float]) -> list[list[Piece]]:
    """Windows of the divided segments, one segment after the other, to the ranks in order, as there is room."""
    if not segments:
        return [[] for _ in room]
    ordered = sorted(segments, key=lambda p: (images[p.image].replica, p.image, p.first))
    windows = [(piece.image, w) for piece in ordered for w in range(piece.first, piece.last)]
    lengths = [images[image].window_lengths[w] for image, w in windows]
    ranges = cut_in_shares(lengths, [amount / sum(room) for amount in room])
    return [[Piece(image, w, w + 1) for image, w in windows[first:last]] for first, last in ranges]


def _join_pieces(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbours of one image made one."""
    joined: list[Piece] = []
    for piece in pieces:
        if joined and joined[-1].image == piece.image and joined[-1].last == piece.first:
            joined[-1] = Piece(piece.image, joined[-1].first, piece.last)
        else:
            joined.append(piece)
    return joined


SAME_DEVICE, SAME_NODE, ELSEWHERE = 0, 1, 2


@dataclass(frozen=True)
class Locality:
    """Distances between vision and text replicas, and the imbalance allowed for nearness.

    distances: from each text replica to each vision replica, one of the three above. slack: the busiest vision replica
    may have more to do by this fraction than under the most even assignment known."""

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
    then give images to the nearest ones that have room. If some remain beyond it, the answer is `even`."""
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
