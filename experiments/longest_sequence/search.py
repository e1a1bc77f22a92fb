"""The largest size whose peak stays within a budget, in few measurements."""

from __future__ import annotations

from collections.abc import Callable

GUESSES = 6  # by proportion; from then on by halves, whatever the peak does


def largest_within(budget: int, peak: Callable[[int], int], start: int) -> int:
    """The largest size ≥ 1 with `peak(size)` ≤ budget, given a peak that grows with the size; 0 where there is none.

    start: the first size to try. Sizes follow from the peak of the last one, as if peaks were in proportion to sizes.
    """
    fits, too_large, size, tried = 0, None, start, 0
    while too_large is None or too_large - fits > 1:
        found, tried = peak(size), tried + 1
        if found <= budget:
            fits = size
        else:
            too_large = size
        guess = size * budget // max(found, 1)
        if too_large is not None and tried >= GUESSES:
            guess = (fits + too_large) // 2
        size = max(guess, fits + 1)
        if too_large is not None:
            size = max(min(size, too_large - 1), 1)
    return fits
