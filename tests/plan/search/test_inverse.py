"""Other questions, by search over few values."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dhp.plan.search.inverse import _first, _last


def at_least(least: int) -> Callable[[int], bool]:
    return lambda value: value >= least


@pytest.mark.parametrize("least", [1, 2, 3, 8])
def test_the_first_that_fits_is_found(least: int) -> None:
    values = [1, 2, 4, 8]
    assert _first(values, at_least(least)) == next(value for value in values if value >= least)


@pytest.mark.parametrize("most", [1, 5, 63, 1000])
def test_the_last_that_fits_is_found_to_a_64th(most: int) -> None:
    def fits(value: int) -> bool:
        return value <= most

    assert most * (1 - 1 / 32) - 1 <= _last(1, 1 << 20, fits) <= most
