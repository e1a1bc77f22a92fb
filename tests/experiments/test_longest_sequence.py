"""The search for the largest size within a budget: what it finds, and what it measures on its way."""

from collections.abc import Callable

import pytest

from experiments.longest_sequence.__main__ import largest_within


def watched(peak: Callable[[int], int]) -> tuple[Callable[[int], int], list[int]]:
    asked: list[int] = []

    def watching(size: int) -> int:
        asked.append(size)
        return peak(size)

    return watching, asked


def test_a_peak_in_proportion_takes_three_steps() -> None:
    peak, asked = watched(lambda size: 10 * size)
    assert largest_within(205, peak, 8) == 20
    assert asked == [8, 20, 21]


def test_a_part_that_does_not_grow_takes_few_more() -> None:
    peak, asked = watched(lambda size: 50 + 10 * size)
    assert largest_within(205, peak, 8) == 15
    assert asked == [8, 12, 14, 15, 16]


@pytest.mark.parametrize("start", [1, 7, 300])
@pytest.mark.parametrize("budget", [1, 99, 100, 101, 12_345])
def test_whatever_the_peak_it_is_the_largest(budget: int, start: int) -> None:
    for peak in (lambda n: n * n, lambda n: 90 + n // 3, lambda n: 5 * -(-n // 4), lambda n: 2 ** min(n, 40)):
        found = largest_within(budget, peak, start)
        assert peak(found + 1) > budget
        assert found == 0 or peak(found) <= budget


def test_nothing_fits() -> None:
    assert largest_within(10, lambda size: 11, 8) == 0
