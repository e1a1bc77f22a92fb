"""How many packs, of how much, and in which steps."""

import numpy as np

from dhp.data.balance.packs import Limits, Packs, divisible, least_bins, others_than, shuffled_steps, whole_shares
from experiments.baselines import costly


def test_bins_keep_both_limits_and_leave_whole_units_of_vision() -> None:
    limits = Limits(vision=9, text=4096)
    assert least_bins(90, 1000, limits) == 10
    assert least_bins(0, 8193, limits) == 3
    assert least_bins(75, 40_000, limits) == 11  # text needs 10, with 7.5 units each; 11 have 7 and a bit less
    assert least_bins(10_001, 10, Limits(vision=1000, text=4096)) == 11  # small units need not be whole


def test_shares_differ_by_one_at_most() -> None:
    shares = whole_shares(11, 4)
    assert shares.sum() == 11 and set(shares) == {2, 3}
    assert len(whole_shares(5, 0)) == 0


def test_packs_of_most_samples_are_halved_until_the_replicas_divide_them() -> None:
    packs = Packs(np.arange(7), np.array([1, 5, 7]))
    assert divisible(packs, 4).ends.tolist() == [1, 3, 5, 7]
    assert divisible(packs, 3) is packs


def test_neighbours_stay_in_a_step() -> None:
    packs = Packs(np.arange(10), np.arange(1, 11))
    steps = shuffled_steps(np.arange(10), packs, 4, np.random.default_rng(0))
    assert sorted(sorted(step) for step in steps.samples[:8].reshape(2, 4).tolist()) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert steps.samples[8:].tolist() == [8, 9]


def test_classes_by_squares_and_the_rest_of_a_choice() -> None:
    assert costly(np.arange(101.0), (0.9, 0.98))[[0, 90, 91, 98, 99]].tolist() == [0, 0, 1, 1, 2]
    assert others_than(np.array([3, 0]), 5).tolist() == [1, 2, 4]
