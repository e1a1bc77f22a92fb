"""Baselines beside the papers' methods: like samples together, packs constant in both, what they register."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from dhp.config.command_line import compose_config
from dhp.config.resolve import resolve
from dhp.core.errors import ConfigError
from dhp.data.balance.methods import BALANCE_METHODS, isf
from dhp.data.balance.packs import Limits, Loads, measure_balance
from dhp.models.registry import import_plugins
from experiments.baselines import _text_heavy, balanced_stages, device_group, length_group
from tests.data.balance.made import LIMITS, mixture

MIXED = mixture()
TWO = Limits(1, 1, samples=2)
# Both orders of the two lengths, so that either alone would pair otherwise.
LOADS = Loads(np.array([5, 1, 5, 1, 0, 0, 9, 9]), np.array([60, 70, 90, 20, 50, 80, 10, 40]))


def pairs(method: Any, loads: Loads, limits: Limits, replicas: int) -> set[frozenset[int]]:
    packs = method(loads, limits, replicas, 3, 8)
    return {frozenset(packs.pack(number).tolist()) for number in range(len(packs))}


def test_a_row_has_neighbours_by_image_tokens_then_by_all_tokens() -> None:
    assert pairs(length_group, LOADS, TWO, 1) == {frozenset(pair) for pair in ((4, 5), (1, 3), (0, 2), (6, 7))}


def test_equal_image_tokens_are_sorted_by_all_tokens() -> None:
    text = Loads(np.zeros(8, np.int64), LOADS.text)
    assert pairs(length_group, text, TWO, 1) == {frozenset(pair) for pair in ((6, 3), (7, 4), (0, 1), (5, 2))}


def test_devices_of_a_step_have_neighbours() -> None:
    packs = device_group(LOADS, replace(TWO, samples=1), 2, 3, 8)
    steps = {frozenset(packs.samples[at : at + 2].tolist()) for at in range(0, 8, 2)}
    assert steps == {frozenset(pair) for pair in ((4, 5), (1, 3), (0, 2), (6, 7))}


@pytest.mark.parametrize("method", [length_group, device_group])
def test_the_larger_the_window_the_more_alike_they_are(method: Any) -> None:
    loads = mixture()
    found = [measure_balance(method(loads, LIMITS, 8, 0, steps), loads, 8, padded=True) for steps in (1, 4, 50)]
    uneven = [one.pad if method is length_group else one.dist_vision for one in found]
    assert uneven[0] > 1.3 * uneven[1] > 1.3 * uneven[2]


ORDINARY = [(1.0, 50.0)] * 40
# A pack is to hold 10 units of vision and 1,000 tokens, and a unit costs 50 tokens at least.
CASES = {
    "room for 60 beside a unit": (9.0, 940.0, False),
    "room for 40 beside a unit": (9.0, 960.0, True),
    "room for 510 beside ten units": (0.0, 490.0, False),
    "room for 490 beside ten units": (0.0, 510.0, True),
    "too much vision": (11.0, 600.0, True),
    "too much text": (1.0, 1100.0, True),
    "half of both": (5.0, 700.0, False),
    "another half": (5.0, 700.0, False),
}


@pytest.mark.parametrize("case", CASES)
def test_heavy_is_what_no_others_can_complete(case: str) -> None:
    vision, text = np.array([*ORDINARY, *((v, t) for v, t, _ in CASES.values())]).T
    assert (vision.sum(), text.sum()) == (80, 8000)
    found = _text_heavy(vision, text, Limits(vision=10, text=1000))
    assert not found[: len(ORDINARY)].any()
    assert found[len(ORDINARY) + [*CASES].index(case)] == CASES[case][2]


def test_packs_constant_in_both() -> None:
    found = measure_balance(balanced_stages(MIXED, LIMITS, 8, 0), MIXED, 8, padded=False)
    assert found.dist_text < 0.006 and found.dist_vision < 0.003
    published = measure_balance(isf(MIXED, LIMITS, 8, 0), MIXED, 8, padded=False)
    assert found.stage_idle < 0.6 * published.stage_idle


def test_native_resolution_where_vision_comes_in_small_units() -> None:
    rng = np.random.default_rng(0)
    merged = rng.lognormal(5.6, 0.5, 10_000).clip(64, 1280).round()
    loads = Loads((4 * merged).astype(np.int64), (merged + rng.lognormal(5, 0.6, 10_000)).astype(np.int64))
    limits = Limits(vision=9216, text=4096)
    found = measure_balance(balanced_stages(loads, limits, 8, 0), loads, 8, padded=False)
    assert found.dist_vision < 0.01 and found.dist_text < 0.04


@pytest.mark.parametrize("method", [length_group, device_group, balanced_stages])
@pytest.mark.parametrize("replicas", [1, 8])
def test_every_sample_is_in_one_pack_as_the_seed_says(method: Any, replicas: int) -> None:
    one, same, other = (method(MIXED, LIMITS, replicas, seed).samples for seed in (5, 5, 6))
    assert np.array_equal(np.sort(one), np.arange(len(MIXED)))
    assert np.array_equal(one, same) and not np.array_equal(one, other)


@pytest.mark.slow
def test_as_a_plugin_it_adds_choices_to_both_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    import_plugins(["experiments.baselines"])
    assert BALANCE_METHODS["length_group"] is length_group
    own = ["data.balance=device_group", "data.packing=false", "text.partition=profile"]
    config = resolve(compose_config("tiny", overrides=own))
    assert (config.data.balance, config.text.partition) == ("device_group", "profile")
    monkeypatch.delitem(BALANCE_METHODS, "device_group")
    with pytest.raises(
        ConfigError, match="data.balance=device_group does not exist; choose from random, isf, balanced"
    ):
        resolve(compose_config("tiny", overrides=own))
