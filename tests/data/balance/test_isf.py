"""Iterative sampling and filtering."""

from dataclasses import replace

import numpy as np

from dhp.data.balance.methods import _fill, isf
from dhp.data.balance.packs import TEXT_ROOM, Limits, Loads
from tests.data.balance.made import LIMITS, mixture


def test_a_pack_closes_before_the_sample_that_would_pass_a_limit() -> None:
    vision, text = np.array([3, 3, 3, 3, 9, 0, 1]), np.array([900, 900, 900, 900, 2500, 1000, 700])
    numbers, full = _fill(vision, text, 9, 4096, 9, 4096 - TEXT_ROOM)
    assert numbers.tolist() == [0, 0, 0, 1, 2, 2, 3]
    assert full.tolist() == [True, False, True, False]  # 9 tiles; 3 tiles; 9 tiles; the rest


def test_either_amount_fills_a_pack() -> None:
    _, full = _fill(np.array([1, 1]), np.array([3968, 3967]), 9, 4096, 9, 4096 - TEXT_ROOM)
    assert full.tolist() == [True, False]


def test_a_sample_beyond_a_limit_has_a_pack_of_its_own_and_costs_nobody_else() -> None:
    loads = Loads(np.array([1, 1, 12, 1]), np.array([600, 600, 3300, 600]))
    packs = isf(loads, LIMITS, 1, seed=0)
    found = sorted(sorted(packs.pack(i).tolist()) for i in range(len(packs)))
    assert [2] in found and sorted(sum(found, [])) == [0, 1, 2, 3]


def test_every_sample_is_in_one_pack_and_all_packs_keep_the_limits() -> None:
    loads = mixture()
    packs = isf(loads, LIMITS, 8, seed=1)
    assert np.array_equal(np.sort(packs.samples), np.arange(len(loads)))
    assert packs.sums(loads.vision).max() <= LIMITS.vision and packs.sums(loads.text).max() <= LIMITS.text


def test_passes_leave_few_packs_that_are_not_full() -> None:
    loads = mixture()

    def share_full(passes: int) -> float:
        packs = isf(loads, replace(LIMITS, passes=passes), 8, 0)
        full = (packs.sums(loads.vision) >= LIMITS.vision) | (packs.sums(loads.text) >= LIMITS.text - TEXT_ROOM)
        return float(full.mean())

    assert share_full(1) < 0.7 < 0.95 < share_full(10)


def test_the_seed_decides() -> None:
    loads = mixture(2000)
    one, same, other = (isf(loads, LIMITS, 8, seed) for seed in (3, 3, 4))
    assert np.array_equal(one.samples, same.samples) and np.array_equal(one.ends, same.ends)
    assert not np.array_equal(one.samples, other.samples)


def test_vision_alone_can_be_what_limits() -> None:
    loads = Loads(np.full(40, 2), np.full(40, 10))
    packs = isf(loads, Limits(vision=8, text=10_000), 1, 0)
    assert packs.counts.tolist() == [4] * 10
