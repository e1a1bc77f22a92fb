"""Bins of exact load."""

import numpy as np
import pytest

from dhp.data.balance.filling import BUCKETS, exact_fill


def test_bins_hold_exactly_what_they_should() -> None:
    rng = np.random.default_rng(0)
    load = rng.lognormal(4, 0.6, 20_000).round().astype(np.int64)
    targets = np.full(3000, load.sum() // 4000)
    number = exact_fill(np.zeros_like(load), load, np.zeros_like(targets), targets)
    made = np.unique(number[number >= 0])
    assert len(made) > 2900
    assert (np.bincount(number[number >= 0], load[number >= 0])[made] == targets[0]).all()


def test_two_amounts_at_once_and_targets_that_differ() -> None:
    rng = np.random.default_rng(1)
    load = rng.integers(1, 50, 20_000)
    counts, targets = np.full(2000, 8), rng.integers(190, 210, 2000)
    number = exact_fill(np.ones_like(load), load, counts, targets)
    held = number >= 0
    made = np.unique(number[held])
    assert len(made) > 1500
    assert (np.bincount(number[held])[made] == 8).all()
    assert (np.bincount(number[held], load[held])[made] == targets[made]).all()


def test_what_cannot_be_completed_is_left_over() -> None:
    odd = np.full(10, 7)
    assert (exact_fill(np.zeros_like(odd), odd, np.zeros(3, np.int64), np.full(3, 20)) == -1).all()


@pytest.mark.parametrize("load", [np.zeros(0, np.int64), np.array([3, BUCKETS])])
def test_no_items_and_loads_too_different_for_a_table(load: np.ndarray) -> None:
    assert (exact_fill(np.zeros_like(load), load, np.zeros(2, np.int64), np.array([3, 3])) == -1).all()


def test_of_completions_that_fit_the_one_of_even_squares_is_taken() -> None:
    load = np.array([50, 90, 10, 50, 50, 50, 50, 50, 50])  # 50 must come first; 100 is missing
    number = exact_fill(np.zeros_like(load), load, np.zeros(1, np.int64), np.array([150]))
    assert sorted(load[number == 0]) == [50, 50, 50]
