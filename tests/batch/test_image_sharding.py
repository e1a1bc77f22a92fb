"""Who works on what: whole images to replicas, whole segments to ranks, windows of large ones where there is room."""

from __future__ import annotations

import random

import pytest

from dhp.batch.assign_images import (
    TOLERANCE,
    ImageWork,
    Piece,
    Pieces,
    assign_longest_first,
    cut_in_shares,
    fill_to_level,
    in_runs,
    segment_cost,
    shard_images,
)


def image(replica: int, *windows: int) -> ImageWork:
    """One segment."""
    return ImageWork(replica, windows, (sum(windows),))


def test_the_dearest_goes_first_to_the_least_loaded() -> None:
    assert assign_longest_first([4, 32, 16, 12], 2) == [[1], [0, 2, 3]]
    assert assign_longest_first([], 2) == [[], []]


@pytest.mark.parametrize(
    ("lengths", "shares", "ranges"),
    [
        ([4, 4, 4, 4], [0.5, 0.5], [(0, 2), (2, 4)]),
        ([16, 4, 4], [0.5, 0.5], [(0, 1), (1, 3)]),
        ([4] * 8, [0.25, 0.0, 0.75], [(0, 2), (2, 2), (2, 8)]),
        ([10] * 4, [0.3, 0.7], [(0, 1), (1, 4)]),  # 12 of 40: back to 10
        ([10] * 4, [0.45, 0.55], [(0, 2), (2, 4)]),  # 18 of 40: on to 20
        ([10] * 4, [0.2, 0.2, 0.6], [(0, 1), (1, 2), (2, 4)]),  # 8 and 16: each from the beginning, not from the cut
        ([], [0.5, 0.5], [(0, 0), (0, 0)]),
    ],
)
def test_cut_in_shares(lengths: list[int], shares: list[float], ranges: list[tuple[int, int]]) -> None:
    assert cut_in_shares(lengths, shares) == ranges


@pytest.mark.parametrize(
    ("loads", "amount", "extra"),
    [([0, 0], 10, [5, 5]), ([4, 0], 10, [3, 7]), ([20, 0, 2], 4, [0, 3, 1]), ([5, 5], 0, [0, 0])],
)
def test_fill_to_level(loads: list[float], amount: float, extra: list[float]) -> None:
    assert fill_to_level(loads, amount) == pytest.approx(extra)


def test_images_that_balance_are_not_divided() -> None:
    images = [image(0, 16, 16), image(0, 16), image(0, 16)]
    assert shard_images(images, 1, 2) == [[(Piece(0, 0, 2),), (Piece(1, 0, 1), Piece(2, 0, 1))]]


def test_only_what_is_too_large_is_divided_into_the_room_that_is_left() -> None:
    images = [image(0, *[16] * 8), image(0, 16), image(0, 16), image(0, 16)]
    first, second = shard_images(images, 1, 2)[0]
    loads = [sum(16 * (p.last - p.first) for p in pieces) for pieces in (first, second)]
    assert sorted(loads) == [80, 96]
    assert {p.image for pieces in (first, second) for p in pieces if p.last - p.first == 1 and p.image} == {1, 2, 3}


def test_a_rank_without_work_has_no_pieces() -> None:
    assert shard_images([image(0, 4)], 2, 2) == [[(Piece(0, 0, 1),), ()], [(), ()]]


def test_frames_of_a_video_are_dealt_out_one_by_one() -> None:
    video = ImageWork(0, (16, 16, 8, 16, 16, 8), (40, 40))
    assert shard_images([video], 1, 2) == [[(Piece(0, 0, 3),), (Piece(0, 3, 6),)]]


def test_what_is_a_little_more_than_an_even_share_is_not_divided() -> None:
    """Within 5% of 100: 104 and 96 stay whole; 112 and 88 do not."""
    assert shard_images([image(0, *[8] * 13), image(0, *[8] * 12)], 1, 2) == [[(Piece(0, 0, 13),), (Piece(1, 0, 12),)]]
    first, second = shard_images([image(0, *[8] * 14), image(0, *[8] * 11)], 1, 2)[0]
    assert sorted(len({p.image for p in pieces}) for pieces in (first, second)) == [1, 2]


@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_frame_of_one_window_stays_whole_however_large_it_is(place: int) -> None:
    lengths = [16, 16, 16]
    lengths.insert(place, 64)
    shards = shard_images([ImageWork(0, tuple(lengths), tuple(lengths))], 1, 2)
    loads = [sum(sum(lengths[p.first : p.last]) for p in pieces) for pieces in shards[0]]
    assert loads == [64, 48] and Piece(0, place, place + 1) in shards[0][0]


def test_images_of_several_windows_are_divided_before_a_larger_one_of_one_window() -> None:
    images = [ImageWork(0, (40,), (40,)), *[ImageWork(0, (16, 16), (32,))] * 2]
    (shards,) = shard_images(images, 1, 2)
    loads = [sum(sum(images[p.image].window_lengths[p.first : p.last]) for p in pieces) for pieces in shards]
    assert sorted(loads) == [48, 56]


def test_pieces_of_a_text_replica_lie_together() -> None:
    images = [image(1, 4), image(0, 16), image(1, 8)]
    assert [p.image for p in shard_images(images, 1, 1)[0][0]] == [1, 0, 2]


def test_full_attention_makes_one_large_image_dearer_than_many_small_ones() -> None:
    large, small = [image(0, *[64] * 16)], [image(0, 64) for _ in range(16)]
    crossover = 512.0
    first, second = (set(p.image for p in shard[0]) for shard in shard_images(large + small, 2, 1, crossover))
    assert segment_cost(1024, crossover) == 3 * 1024
    # 3072 against 16 × 72: the large one alone, without any of the small ones.
    assert {frozenset(first), frozenset(second)} == {frozenset({0}), frozenset(range(1, 17))}


def _covered(images: list[ImageWork], shards: list[list[Pieces]]) -> list[tuple[int, int]]:
    return sorted((p.image, w) for r in shards for pieces in r for p in pieces for w in range(p.first, p.last))


@pytest.mark.parametrize("crossover", [float("inf"), 100.0])
def test_every_window_goes_somewhere_once_and_loads_are_even(crossover: float) -> None:
    rng = random.Random(0)
    for _ in range(300):
        images = [
            image(rng.randint(0, 1), *(rng.choice([4, 8, 16, 64]) for _ in range(rng.randint(1, 40))))
            for _ in range(rng.randint(0, 8))
        ]
        ranks = rng.randint(1, 4)
        shards = shard_images(images, 1, ranks, crossover)
        every = [(i, w) for i, one in enumerate(images) for w in range(len(one.window_lengths))]
        assert _covered(images, shards) == every
        for pieces in shards[0]:
            assert [images[p.image].replica for p in pieces] == sorted(images[p.image].replica for p in pieces)
        if crossover == float("inf"):
            loads = [sum(sum(images[p.image].window_lengths[p.first : p.last]) for p in s) for s in shards[0]]
            # Within the tolerance, or within what a cut between two windows may miss at both ends.
            assert max(loads) <= max(TOLERANCE * sum(loads) / ranks, sum(loads) / ranks + 64)


def test_frames_that_follow_each_other_stay_together() -> None:
    video = image(0, *[64] * 12)
    shards = shard_images([ImageWork(0, video.window_lengths, (64,) * 12)], 1, 3)
    assert shards[0] == [(Piece(0, 0, 4),), (Piece(0, 4, 8),), (Piece(0, 8, 12),)]


def test_runs_keep_the_kinds_of_each_bin() -> None:
    assert in_runs([[0, 3], [1, 4], [2, 5]], "aaabbb") == [[0, 3], [1, 4], [2, 5]]
    assert in_runs([[0, 3], [1, 4], [2, 5]], "aaaaaa") == [[0, 1], [2, 3], [4, 5]]
