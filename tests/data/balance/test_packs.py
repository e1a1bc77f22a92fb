"""Packs as data."""

import numpy as np

from dhp.data.balance.packs import Limits, Packs, divisible, from_groups, join, least_bins

THREE = Packs(np.array([4, 1, 0, 2, 3]), np.array([2, 3, 5]))


def test_counts_sums_and_maxima() -> None:
    values = np.array([10, 1, 20, 2, 5])
    assert len(THREE) == 3
    assert THREE.counts.tolist() == [2, 1, 2]
    assert THREE.sums(values).tolist() == [6, 10, 22]
    assert THREE.maxima(values).tolist() == [5, 10, 20]
    assert [THREE.pack(i).tolist() for i in range(3)] == [[4, 1], [0], [2, 3]]


def test_another_order_and_a_part_of_it() -> None:
    turned = THREE.reordered(np.array([2, 0]))
    assert turned.samples.tolist() == [2, 3, 4, 1] and turned.ends.tolist() == [2, 4]
    assert len(THREE.reordered(np.array([], dtype=np.int64))) == 0


def test_groups_become_packs_in_order_of_their_numbers() -> None:
    packs = from_groups(np.array([7, 2, 7, 5, 2]))
    assert [packs.pack(i).tolist() for i in range(len(packs))] == [[1, 4], [3], [0, 2]]


def test_joined_packs_stand_one_after_another() -> None:
    both = join([THREE, Packs(np.array([9]), np.array([1]))])
    assert [both.pack(i).tolist() for i in range(len(both))] == [[4, 1], [0], [2, 3], [9]]


def test_packs_of_most_samples_are_halved_until_steps_are_full() -> None:
    assert divisible(THREE, 3) is THREE
    halved = divisible(THREE, 5)
    assert halved.samples.tolist() == THREE.samples.tolist() and halved.ends.tolist() == [1, 2, 3, 4, 5]
    assert divisible(THREE, 4).ends.tolist() == [1, 2, 3, 5]


def test_the_mean_of_few_units_is_brought_down_to_a_whole_one() -> None:
    limits = Limits(vision=9, text=4096)
    assert least_bins(8500, 1, limits) == 1063  # 945 would hold 8.99 each
    assert least_bins(8999, 1, limits) == 1000  # one more than 999.9, and nine of them are whole but for one unit
    assert least_bins(5, 3 * 4096, limits) == 5 and least_bins(0, 4097, limits) == 2
