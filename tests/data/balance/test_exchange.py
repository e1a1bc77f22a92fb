"""Bins of equal load."""

import numpy as np
import pytest

from dhp.data.balance.exchange import _distribute, _is_even, exchange
from dhp.data.balance.filling import best_fit


def items(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(6, 0.6, (count, 1)).round()


@pytest.mark.parametrize("moves", [True, False])
def test_every_item_is_in_one_bin(moves: bool) -> None:
    loads = items(1003)
    packs = exchange(loads, 100, loads.sum(0) / 100, (1.0,), 8, moves=moves)
    assert np.array_equal(np.sort(packs.samples), np.arange(1003))
    assert len(packs) == 100
    if not moves:
        assert set(packs.counts) == {10, 11}


def test_loads_come_close_to_one_another() -> None:
    loads = items(5000)
    spread = []
    for passes, divisions in ((0, 0), (8, 0), (8, 8)):
        packs = exchange(loads, 1000, loads.sum(0) / 1000, (1.0,), passes, divisions)
        sums = packs.sums(loads[:, 0])
        assert sums.sum() == loads.sum()
        spread.append(float(np.median(np.abs(sums / sums.mean() - 1.0))))
    assert spread[0] > 5 * spread[1] > 10 * spread[2]
    assert spread[2] < 1e-3


def test_two_features_at_once() -> None:
    rng = np.random.default_rng(1)
    tiles = rng.choice([1.0, 3.0], 4000)
    loads = np.stack([tiles, 256 * tiles + rng.lognormal(5, 0.5, 4000)], axis=1)
    packs = exchange(loads, 800, loads.sum(0) / 800, (16.0, 1.0), 10, 10)
    for feature, most in ((0, 0.06), (1, 0.02)):
        sums = packs.sums(loads[:, feature])
        assert sums.std() / sums.mean() < most


def test_the_best_division_of_two_bins_is_found() -> None:
    loads = np.array([[7.0], [5.0], [4.0], [4.0], [3.0], [1.0]])  # 12 + 12 needs two exchanges at once from some deals
    packs = exchange(loads, 2, (12.0,), (1.0,), 0, 1)
    assert packs.sums(loads[:, 0]).tolist() == [12.0, 12.0]


def test_items_are_dealt_back_and_forth() -> None:
    held, counts = _distribute(np.arange(8), 3)
    assert [held[bin_, :n].tolist() for bin_, n in enumerate(counts)] == [[0, 5, 6], [1, 4, 7], [2, 3]]


def test_fewer_items_than_bins_leave_no_empty_pack() -> None:
    packs = exchange(items(3), 5, (400.0,), (1.0,), 2, 2)
    assert len(packs) == 3 and packs.counts.tolist() == [1, 1, 1]


def test_best_fit_keeps_the_limit_and_leaves_the_too_large_alone() -> None:
    sizes = np.array([6.0, 5.0, 5.0, 4.0, 12.0])
    bins = best_fit(sizes, 10.0)
    assert bins[0] == bins[3] and bins[1] == bins[2] and (bins == bins[4]).sum() == 1
    rng = np.random.default_rng(0)
    many = rng.integers(1, 4000, 5000).astype(float)
    assert np.bincount(best_fit(many, 4096.0), many).max() <= 4096


def test_bins_are_even_where_both_are_near_one_in_each_feature() -> None:
    sums = np.array([[1.0, 0.97], [1.02, 1.0], [1.0, 2.0]])
    assert _is_even(sums, 0, 1, 0.031)
    assert not _is_even(sums, 0, 1, 0.029)  # one is 0.03 below in the second
    assert not _is_even(sums, 1, 0, 0.019)
    assert not _is_even(sums, 0, 2, 0.5)


def test_the_largest_are_dealt_first() -> None:
    loads = np.array([[1.0], [10.0], [4.0], [2.0], [5.0]])
    assert sorted(exchange(loads, 2, (11.0,), (1.0,), 0).sums(loads[:, 0])) == [9.0, 13.0]
