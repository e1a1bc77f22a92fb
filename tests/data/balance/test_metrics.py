"""The measures, by hand."""

import numpy as np
import pytest

from dhp.data.balance.packs import QUADRATIC_TOKENS, Loads, Packs, dist_ratio, measure_balance

LOADS = Loads(np.array([1, 3, 2, 2]), np.array([100, 300, 200, 100]))
PACKS = Packs(np.array([0, 1, 2, 3]), np.array([2, 4]))  # 4 and 4 tiles, 400 and 300 tokens


def test_without_padding() -> None:
    found = measure_balance(PACKS, LOADS, 2, padded=False)
    assert (found.packs, found.samples, found.dropped) == (2, 4, 0)
    assert found.pad == 0 and found.dist_vision == 0
    assert found.dist_text == pytest.approx(100 / (400 * 2))
    assert found.cv_text == pytest.approx(50 / 350)
    assert found.critical == pytest.approx(400 / 350)
    assert found.stage_idle == pytest.approx(1 - 1 / ((400 / 350 + 1) / 2))


def test_operations_grow_faster_than_tokens() -> None:
    work = lambda *lengths: sum(tokens * (1 + tokens / QUADRATIC_TOKENS) for tokens in lengths)
    found = measure_balance(PACKS, LOADS, 2, padded=False)
    most, least = work(100, 300), work(200, 100)
    assert found.dist_flops == pytest.approx((most - least) / (most * 2)) != found.dist_text


def test_a_small_step_counts_as_much_as_a_large_one() -> None:
    loads = Loads(np.ones(4, np.int64), np.array([4, 2, 40, 40]))
    packs = Packs(np.arange(4), np.arange(1, 5))
    assert measure_balance(packs, loads, 2, padded=False).dist_text == (0.25 + 0.0) / 2


def test_with_padding() -> None:
    found = measure_balance(PACKS, LOADS, 2, padded=True)
    assert found.pad == pytest.approx((200 / 600 + 100 / 400) / 2)
    assert found.dist_text == pytest.approx(200 / (600 * 2))


def test_images_that_go_to_any_rank() -> None:
    loads = Loads(np.array([5, 0, 1, 1]), np.array([9, 9, 9, 9]))
    found = measure_balance(PACKS, loads, 2, padded=False)
    assert found.dist_assigned == pytest.approx(1 / (4 * 2))  # 7 tiles: 4 and 3
    assert found.dist_vision == pytest.approx(3 / (5 * 2))


def test_samples_that_are_missing_are_dropped_ones() -> None:
    assert measure_balance(Packs(np.array([0, 1]), np.array([1, 2])), LOADS, 2, False).dropped == 2


def test_fewer_packs_than_replicas_leave_some_without_work() -> None:
    found = measure_balance(PACKS, LOADS, 4, padded=False)
    assert found.critical == pytest.approx(400 / 175)
    assert found.dist_text == pytest.approx((4 * 400 - 700) / (400 * 4))


def test_text_alone() -> None:
    found = measure_balance(PACKS, Loads(np.zeros(4, np.int64), LOADS.text), 2, padded=False)
    assert found.dist_vision == found.dist_assigned == found.cv_vision == 0


def test_nothing_to_do_is_balanced() -> None:
    assert dist_ratio(np.zeros(4)) == 0.0
    assert dist_ratio(np.array([2.0, 1.0])) == pytest.approx(0.25)


def test_packs_in_random_order_have_no_bias_and_sorted_ones_have() -> None:
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 9, 8000)
    loads = Loads(np.ones(counts.sum(), np.int64), np.ones(counts.sum(), np.int64))
    packs = Packs(np.arange(counts.sum()), np.cumsum(counts))
    assert measure_balance(packs, loads, 8, False).bias == pytest.approx(1.0, abs=0.15)
    alike = packs.reordered(np.argsort(counts, kind="stable"))
    assert measure_balance(alike, loads, 8, False).bias == pytest.approx(8.0, rel=0.02)
