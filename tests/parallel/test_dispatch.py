"""Who works on what: whole images to replicas, consecutive windows to the ranks of a sequence."""

from __future__ import annotations

import random

import pytest

from dhp.parallel.dispatch import ImageWork, Piece, assign_images, cut_evenly, shard_images


def test_images_go_to_the_least_loaded_replica_longest_first() -> None:
    images = [ImageWork(0, (4,)), ImageWork(0, (16, 16)), ImageWork(1, (16,)), ImageWork(1, (8, 4))]
    assert assign_images(images, 2) == [[1], [0, 2, 3]]


def test_a_replica_keeps_the_order_of_text_replicas() -> None:
    images = [ImageWork(1, (4,)), ImageWork(0, (16,)), ImageWork(1, (8,))]
    assert assign_images(images, 1) == [[1, 0, 2]]


@pytest.mark.parametrize(
    ("lengths", "ranks", "ranges"),
    [
        ([4, 4, 4, 4], 2, [(0, 2), (2, 4)]),
        ([16, 8, 16, 8, 4], 2, [(0, 2), (2, 5)]),
        ([16, 4, 4], 2, [(0, 1), (1, 3)]),
        ([4, 4, 4], 4, [(0, 1), (1, 2), (2, 3), (3, 3)]),
        ([64, 4], 4, [(0, 1), (1, 2), (2, 2), (2, 2)]),
        ([4], 3, [(0, 1), (1, 1), (1, 1)]),
        ([], 2, [(0, 0), (0, 0)]),
    ],
)
def test_cut_evenly(lengths: list[int], ranks: int, ranges: list[tuple[int, int]]) -> None:
    assert cut_evenly(lengths, ranks) == ranges


def test_cuts_cover_everything_once_and_leave_empty_ranks_last() -> None:
    rng = random.Random(0)
    for _ in range(300):
        lengths = [rng.choice([4, 8, 12, 16, 64]) for _ in range(rng.randint(0, 12))]
        ranges = cut_evenly(lengths, rng.randint(1, 6))
        assert [i for first, last in ranges for i in range(first, last)] == list(range(len(lengths)))
        empty = [first == last for first, last in ranges]
        assert empty == sorted(empty)


def test_no_rank_exceeds_the_even_share_by_more_than_the_largest_window() -> None:
    rng = random.Random(1)
    for _ in range(300):
        lengths = [rng.choice([4, 8, 16, 64]) for _ in range(rng.randint(8, 40))]
        ranks = rng.randint(1, 4)
        loads = [sum(lengths[first:last]) for first, last in cut_evenly(lengths, ranks)]
        assert max(loads) <= sum(lengths) / ranks + max(lengths)


def test_pieces_join_neighbouring_windows_of_an_image() -> None:
    images = [ImageWork(0, (16, 16, 8)), ImageWork(0, (16, 4))]
    assert shard_images(images, 1, 2) == [[(Piece(0, 0, 2),), (Piece(0, 2, 3), Piece(1, 0, 2))]]


def test_a_rank_without_work_has_no_pieces() -> None:
    assert shard_images([ImageWork(0, (4,))], 2, 2) == [[(Piece(0, 0, 1),), ()], [(), ()]]
