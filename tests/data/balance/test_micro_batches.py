"""Rows of a step over its micro-batches."""

import numpy as np
import pytest

from dhp.data.balance.methods import per_modality
from dhp.data.balance.micro_batches import even_micro_batches
from dhp.data.balance.packs import Limits, Loads, single


def alike(vision: np.ndarray) -> Loads:
    """Of as much text each."""
    return Loads(vision, np.full(len(vision), 100))


def sums(vision: np.ndarray, rows: int, replicas: int) -> list[list[int]]:
    """By step, of each micro-batch in whole steps."""
    packs = even_micro_batches(single(np.arange(len(vision))), alike(vision), rows, replicas)
    steps = len(vision) // rows
    of_packs = packs.sums(vision)[: steps * rows].reshape(steps, rows)
    return [[int(own[at : at + replicas].sum()) for at in range(0, rows, replicas)] for own in of_packs]


def test_micro_batches_of_a_step_are_even() -> None:
    assert sums(np.array([9, 1, 8, 2, 7, 3, 6, 4]), 8, 2) == [[10, 10, 10, 10]]
    assert sums(np.array([5, 5, 5, 1, 1, 1, 9, 2]), 4, 2) == [[10, 6], [10, 3]]  # as rows of two allow


def test_largest_first_alone_does_not_even_these() -> None:
    """8 goes with 4, 7 with 5 and 6 apart from both: exchanges find 15 and 15."""
    assert sums(np.array([8, 7, 6, 5, 4, 0]), 6, 3) == [[15, 15]]


def test_a_last_micro_batch_of_fewer_rows_has_its_share() -> None:
    assert sums(np.array([6, 6, 6, 6, 6, 6, 6]), 7, 3) == [[18, 18, 6]]
    assert sums(np.array([1, 9, 1, 9, 5]), 5, 2) == [[10, 10, 5]]


@pytest.mark.parametrize("seed", range(5))
def test_steps_have_the_packs_that_they_had(seed: int) -> None:
    rng = np.random.default_rng(seed)
    vision, rows = rng.integers(0, 40, 50), 12
    packs = even_micro_batches(single(np.arange(50)), alike(vision), rows, 3)
    for start in range(0, 48, rows):
        assert sorted(packs.samples[start : start + rows]) == list(range(start, start + rows))
    assert packs.samples[48:].tolist() == [48, 49]  # a short step stays


def test_nothing_moves_where_a_step_is_one_micro_batch() -> None:
    packs = single(np.arange(8))
    assert even_micro_batches(packs, alike(np.arange(8)), 4, 4).samples.tolist() == list(range(8))


def test_rows_of_unlike_text_stay_beside_those_of_their_length() -> None:
    """Else replicas of a micro-batch would wait for the longest."""
    loads = Loads(np.array([9, 9, 1, 1]), np.array([100, 100, 200, 200]))
    packs = even_micro_batches(single(np.arange(4)), loads, 4, 2)
    assert packs.samples.tolist() == [0, 1, 2, 3]
    like = Loads(np.array([9, 9, 1, 1]), np.array([200, 100, 199, 100]))  # either may go with its like
    packs = even_micro_batches(single(np.arange(4)), like, 4, 2)
    assert sorted(map(sorted, packs.samples.reshape(2, 2).tolist())) in ([[0, 3], [1, 2]], [[0, 1], [2, 3]])
    assert packs.sums(like.vision).reshape(2, 2).sum(axis=1).tolist() == [10, 10]


@pytest.mark.parametrize(("rows", "replicas"), [(32, 4), (64, 8)])
def test_text_of_a_micro_batch_stays_as_even_as_it_was(rows: int, replicas: int) -> None:
    rng = np.random.default_rng(1)
    vision = rng.choice([0, 1, 3, 5], 5000)
    loads = Loads(vision, 256 * vision + rng.lognormal(5.5, 0.9, 5000).astype(np.int64).clip(16, 4096))
    packs = per_modality(loads, Limits(9, 4096, 4), rows, 0)

    def longest(of: np.ndarray) -> np.ndarray:
        whole = of[: len(of) // rows * rows].reshape(-1, replicas)
        return whole.max(axis=1) / whole.mean(axis=1)

    before, after = (longest(one.sums(loads.text)) for one in (packs, even_micro_batches(packs, loads, rows, replicas)))
    assert after.max() <= before.max() + 0.02 and after.mean() <= before.mean() + 1e-3
