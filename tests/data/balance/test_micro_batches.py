"""Rows of a step over its micro-batches."""

import numpy as np
import pytest

from dhp.data.balance.micro_batches import even_micro_batches
from dhp.data.balance.packs import single


def sums(vision: np.ndarray, rows: int, replicas: int) -> list[list[int]]:
    """By step, of each micro-batch in whole steps."""
    packs = even_micro_batches(single(np.arange(len(vision))), vision, rows, replicas)
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
    packs = even_micro_batches(single(np.arange(50)), vision, rows, 3)
    for start in range(0, 48, rows):
        assert sorted(packs.samples[start : start + rows]) == list(range(start, start + rows))
    assert packs.samples[48:].tolist() == [48, 49]  # a short step stays


def test_nothing_moves_where_a_step_is_one_micro_batch() -> None:
    packs = single(np.arange(8))
    assert even_micro_batches(packs, np.arange(8), 4, 4).samples.tolist() == list(range(8))
