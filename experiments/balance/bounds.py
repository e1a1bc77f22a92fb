"""How few packs there can be, whatever the method."""

from __future__ import annotations

from math import ceil

import numpy as np

from dhp.data.balance.packs import Limits, Loads


def least_packs(loads: Loads, limits: Limits) -> int:
    """A lower bound on the packs that hold all samples within the limits; beyond one, a sample has a pack of its own.

    Of vision and text each, Martello and Toth's L2 (1990, Knapsack Problems, section 8.3): samples above limit − x need
    a pack each, those above half of the limit too, and what is between x and half fills their room at best.
    """
    alone = (loads.vision > limits.vision) | (loads.text > limits.text)
    inside = ~alone
    both = ((loads.vision[inside], limits.vision), (loads.text[inside], limits.text))
    return int(alone.sum()) + max(_l2(sizes, limit) for sizes, limit in both)


def _l2(sizes: np.ndarray, limit: int) -> int:
    ordered = np.sort(sizes)
    sums = np.concatenate([[0], np.cumsum(ordered)])
    half = np.searchsorted(ordered, limit / 2, side="right")
    best = ceil(sums[-1] / limit)
    for x in np.unique([0, *ordered[ordered <= limit / 2]]):
        large = np.searchsorted(ordered, limit - x, side="right")
        from_x = np.searchsorted(ordered, x, side="left")
        middle = large - half
        room = middle * limit - (sums[large] - sums[half])
        rest = sums[half] - sums[from_x] - room
        best = max(best, (len(ordered) - large) + middle + max(0, ceil(rest / limit)))
    return int(best)  # NumPy's numbers are none of JSON's
