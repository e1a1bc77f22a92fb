"""Images stay near the text replica that needs them, as far as balance allows."""

from __future__ import annotations

import numpy as np
import pytest

from dhp.batch.assign_images import ImageWork, Locality, assign_longest_first, assign_near, shard_images

PAIR = ((0, 1), (1, 0))  # two replicas of each part, on a device each


def loads_of(costs: list[float], assigned: list[list[int]]) -> list[float]:
    return [sum(costs[i] for i in own) for own in assigned]


def test_even_images_stay_at_home() -> None:
    costs, replicas = [4.0, 4.0, 2.0, 2.0], [0, 1, 0, 1]
    even = assign_longest_first(costs, 2)
    assert assign_near(costs, replicas, even, Locality(PAIR, 0.0)) == [[0, 2], [1, 3]]


def test_a_replica_without_images_takes_some_of_the_other_s() -> None:
    costs, replicas = [4.0, 3.0, 3.0, 2.0], [0, 0, 0, 0]
    found = assign_near(costs, replicas, assign_longest_first(costs, 2), Locality(PAIR, 0.0))
    assert loads_of(costs, found) == [6.0, 6.0]


def test_slack_keeps_more_at_home() -> None:
    costs, replicas = [5.0, 5.0, 1.0, 10.0], [0, 0, 0, 1]
    even = assign_longest_first(costs, 2)
    assert loads_of(costs, even) == [11.0, 10.0]
    assert assign_near(costs, replicas, even, Locality(PAIR, 0.0)) == [[0, 1, 2], [3]]
    costs = [5.0, 5.0, 1.0, 9.0]
    even = assign_longest_first(costs, 2)
    assert assign_near(costs, replicas, even, Locality(PAIR, 0.0)) == [[0, 1], [2, 3]]
    assert assign_near(costs, replicas, even, Locality(PAIR, 0.1)) == [[0, 1, 2], [3]]


def test_of_images_that_end_the_excess_the_smallest_leaves() -> None:
    assert assign_near([6.0, 4.0, 3.0], [0] * 3, [[0, 1], [2]], Locality(PAIR, 0.0)) == [[0, 1], [2]]


def test_what_must_leave_goes_to_the_same_node_first() -> None:
    distances = ((0, 1, 2), (1, 0, 2), (2, 2, 0))
    found = assign_near([1.0] * 4, [0] * 4, [[0, 1], [2], [3]], Locality(distances, 0.0))
    assert [len(own) for own in found] == [2, 2, 0]


@pytest.mark.parametrize("slack", [0.0, 0.01, 0.05])
@pytest.mark.parametrize(("vision", "text", "images"), [(2, 2, 7), (8, 8, 60), (16, 2, 40), (3, 5, 20), (6, 4, 0)])
def test_every_image_goes_somewhere_once_and_nobody_has_more_than_the_slack(
    vision: int, text: int, images: int, slack: float
) -> None:
    rng = np.random.default_rng(vision * text)
    distances = tuple(tuple(int(v * text // vision != d) for v in range(vision)) for d in range(text))
    for _ in range(20):
        costs, replicas = rng.lognormal(7, 1, images).tolist(), rng.integers(0, text, images).tolist()
        even = assign_longest_first(costs, vision)
        found = assign_near(costs, replicas, even, Locality(distances, slack))
        assert sorted(i for own in found for i in own) == list(range(images))
        most = max(loads_of(costs, even), default=0.0)
        assert max(loads_of(costs, found), default=0.0) <= (1 + slack) * most + 1e-6
        again = assign_near(costs, replicas, even, Locality(distances, slack))
        assert found == again


def test_pieces_follow() -> None:
    images = [ImageWork(replica, (4, 4), (8,)) for replica in (1, 0, 1, 0)]
    pieces = shard_images(images, 2, 1, locality=Locality(PAIR, 0.01))
    assert [[p.image for p in of_rank] for of_replica in pieces for of_rank in of_replica] == [[1, 3], [0, 2]]
