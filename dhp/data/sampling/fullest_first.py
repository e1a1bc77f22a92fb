"""The fullest steps come first: what a run measures in its first steps is then the most that it will need."""

from __future__ import annotations

import numpy as np

from dhp.data.balance.packs import Loads, Packs


def fullest_first(packs: Packs, loads: Loads, width: int) -> Packs:
    """The same packs with up to two steps moved to the front: the one that has the pack with most text, of equal ones
    that with most vision; and the one with most vision over all its packs, unless that is the first one.

    Packs of a step stay together, so a step is as even as before; all other steps stay in their order. Packs behind the
    last whole step stay where they are. width: packs of a step, 1 or more.
    """
    steps = len(packs) // width
    if steps < 2:
        return packs
    whole = steps * width
    text, vision = packs.sums(loads.text)[:whole], packs.sums(loads.vision)[:whole]
    longest = np.flatnonzero(text == text.max())
    leading = [int(longest[vision[longest].argmax()]) // width]
    of_steps = vision.reshape(steps, width).sum(axis=1)
    if of_steps[leading[0]] < of_steps.max():
        leading.append(int(of_steps.argmax()))
    order = np.concatenate([leading, np.delete(np.arange(steps), leading)])
    moved = (order[:, None] * width + np.arange(width)).ravel()
    return packs.reordered(np.concatenate([moved, np.arange(whole, len(packs))]))
