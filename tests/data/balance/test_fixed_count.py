"""Like samples together: by both lengths, within windows of a random order."""

from dataclasses import replace

import numpy as np
import pytest

from dhp.data.balance.methods import device_group, length_group
from dhp.data.balance.packs import Limits, Loads, Method, measure_balance
from tests.data.balance.made import LIMITS, mixture

TWO = Limits(1, 1, samples=2, window=8)
# Both orders of the two lengths, so that either alone would pair otherwise.
LOADS = Loads(np.array([5, 1, 5, 1, 0, 0, 9, 9]), np.array([60, 70, 90, 20, 50, 80, 10, 40]))


def pairs(method: Method, loads: Loads, limits: Limits, replicas: int) -> set[frozenset[int]]:
    packs = method(loads, limits, replicas, 3)
    return {frozenset(packs.pack(number).tolist()) for number in range(len(packs))}


def test_a_row_has_neighbours_by_image_tokens_then_by_all_tokens() -> None:
    assert pairs(length_group, LOADS, TWO, 1) == {frozenset(pair) for pair in ((4, 5), (1, 3), (0, 2), (6, 7))}


def test_equal_image_tokens_are_sorted_by_all_tokens() -> None:
    text = Loads(np.zeros(8, np.int64), LOADS.text)
    assert pairs(length_group, text, TWO, 1) == {frozenset(pair) for pair in ((6, 3), (7, 4), (0, 1), (5, 2))}


def test_devices_of_a_step_have_neighbours() -> None:
    packs = device_group(LOADS, replace(TWO, samples=1), 2, 3)
    steps = {frozenset(packs.samples[at : at + 2].tolist()) for at in range(0, 8, 2)}
    assert steps == {frozenset(pair) for pair in ((4, 5), (1, 3), (0, 2), (6, 7))}


@pytest.mark.parametrize("method", [length_group, device_group])
def test_the_larger_the_window_the_more_alike_they_are(method: Method) -> None:
    loads = mixture()
    found = [
        measure_balance(method(loads, replace(LIMITS, window=steps), 8, 0), loads, 8, padded=True, dispatched=False)
        for steps in (1, 4, 50)
    ]
    uneven = [one.pad if method is length_group else one.dist_vision for one in found]
    assert uneven[0] > 1.3 * uneven[1] > 1.3 * uneven[2]
