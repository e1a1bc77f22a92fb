"""Packs as data."""

from __future__ import annotations

import numpy as np

from dhp.data.balance.packs import Packs, from_groups, join

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
