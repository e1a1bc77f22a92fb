"""Packs of constant load, and steps of them."""

import numpy as np
import pytest

from dhp.data.balance.methods import BALANCE_METHODS as METHODS
from dhp.data.balance.packs import Limits, Loads, measure_balance
from tests.data.balance.made import LIMITS, mixture

LOADS = mixture()


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("replicas", [1, 8])
def test_every_sample_is_in_one_pack(name: str, replicas: int) -> None:
    packs = METHODS[name](LOADS, LIMITS, replicas, 0)
    assert np.array_equal(np.sort(packs.samples), np.arange(len(LOADS)))
    if name.startswith("balanced"):
        assert len(packs) % replicas == 0
        assert packs.sums(LOADS.text).max() <= LIMITS.text


@pytest.mark.parametrize("name", METHODS)
def test_the_seed_decides(name: str) -> None:
    one, same, other = (METHODS[name](LOADS, LIMITS, 4, seed).samples for seed in (5, 5, 6))
    assert np.array_equal(one, same) and not np.array_equal(one, other)


@pytest.mark.parametrize("name", METHODS)
def test_a_handful_of_samples(name: str) -> None:
    few = Loads(np.array([0, 0, 20, 1, 1]), np.array([20, 5000, 30, 300, 280]))
    for replicas in (1, 2, 4):
        packs = METHODS[name](few, LIMITS, replicas, 0)
        assert np.array_equal(np.sort(packs.samples), np.arange(5))


@pytest.mark.parametrize("name", METHODS)
def test_text_alone(name: str) -> None:
    loads = Loads(np.zeros(500, np.int64), LOADS.text[:500])
    assert np.array_equal(np.sort(METHODS[name](loads, LIMITS, 4, 0).samples), np.arange(500))


def test_rows_of_constant_text_and_steps_of_constant_vision() -> None:
    found = measure_balance(METHODS["balanced"](LOADS, LIMITS, 8, 0), LOADS, 8, padded=False)
    published = measure_balance(METHODS["isf"](LOADS, LIMITS, 8, 0), LOADS, 8, padded=False)
    assert found.pad == 0 and found.dropped == 0
    assert found.dist_text < 0.004 < published.dist_text / 10
    assert found.dist_assigned < 0.006
    assert found.bias < 2.0


def test_rows_are_as_many_as_fill_steps_before_they_are_made_even() -> None:
    """Three would hold all, and two replicas need four."""
    loads = Loads(np.zeros(12, np.int64), np.full(12, 100))
    packs = METHODS["balanced"](loads, Limits(vision=1, text=400), 2, 0)
    assert packs.sums(loads.text).tolist() == [300] * 4


def test_only_samples_beyond_the_limit_make_packs_beyond_it() -> None:
    text = LOADS.text.copy()
    text[:40] = 5000
    packs = METHODS["balanced"](Loads(LOADS.vision, text), LIMITS, 8, 0)
    assert np.array_equal(np.sort(packs.samples), np.arange(len(LOADS)))
    over = packs.sums(text) > LIMITS.text
    assert over.sum() == 40 and (packs.counts[over] == 1).all()


def test_random_rows_have_a_fixed_count() -> None:
    assert set(METHODS["random"](LOADS, LIMITS, 8, 0).counts[:-1]) == {LIMITS.samples}
