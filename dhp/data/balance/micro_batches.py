"""Rows of a step over its micro-batches."""

import numpy as np

from dhp.data.balance.packs import Loads, Packs

ALIKE = 0.02  # rows whose texts differ by no more than this share of the step's longest may change places
EVENED = ("balanced",)  # methods whose micro-batches are evened; ISF's stay as published


def even_micro_batches(packs: Packs, loads: Loads, rows: int, replicas: int) -> Packs:
    """The same steps of `rows` packs, each in `micro_batch_order`; a last step of fewer packs stays as it is."""
    whole = len(packs) // rows * rows
    of_steps = (packs.sums(values)[:whole].reshape(-1, rows) for values in (loads.vision, loads.text))
    orders = [
        start + micro_batch_order(vision, text, replicas)
        for start, vision, text in zip(range(0, whole, rows), *of_steps)
    ]
    return packs.reordered(np.concatenate([*orders, np.arange(whole, len(packs))]))


def micro_batch_order(vision: np.ndarray, text: np.ndarray, replicas: int) -> np.ndarray:
    """The rows of a step in an order in which each `replicas` neighbours, a micro-batch, have as much vision as the
    next ones, as far as whole rows allow; the last micro-batch may have fewer rows, and then has its share.

    vision, text: int64 [rows], what each row holds. Where rows are of one length, the largest go first, each to the
    micro-batch that lacks most. Then two rows of like text change places between two micro-batches as long as both come
    nearer: replicas that work at the same time keep as much text as they had."""
    count = -(-len(vision) // replicas)
    if count < 2:
        return np.arange(len(vision))
    room = np.full(count, replicas)
    room[-1] = len(vision) - (count - 1) * replicas
    group = np.repeat(np.arange(count), room)
    most = ALIKE * text.max()
    share = vision.sum() * room / len(vision)
    if np.ptp(text) <= most:
        group = _largest_first(vision, room, share)
    over = np.bincount(group, vision, count) - share  # what each micro-batch has beyond its share
    while _exchange(vision, text, most, group, over):
        pass
    return np.argsort(group, kind="stable")


def _largest_first(vision: np.ndarray, room: np.ndarray, share: np.ndarray) -> np.ndarray:
    """The micro-batch of each row."""
    group, left, over = np.empty(len(vision), dtype=np.int64), room.copy(), -share
    for row in np.argsort(-vision, kind="stable"):
        group[row] = least = int(np.where(left > 0, over, np.inf).argmin())
        over[least] += vision[row]
        left[least] -= 1
    return group


def _exchange(vision: np.ndarray, text: np.ndarray, most: float, group: np.ndarray, over: np.ndarray) -> bool:
    """Let two rows change places between the two micro-batches that differ most of those which have such rows; False
    where none makes two more even."""
    ranked = np.argsort(over, kind="stable")
    pairs = [(over[full] - over[empty], full, empty) for full in ranked for empty in ranked if over[full] > over[empty]]
    for gap, full, empty in sorted(pairs, key=lambda pair: -pair[0]):
        own, other = np.flatnonzero(group == full), np.flatnonzero(group == empty)
        moved = vision[own][:, None] - vision[other]
        after = np.abs(gap - 2 * moved) + np.where(np.abs(text[own][:, None] - text[other]) <= most, 0.0, np.inf)
        at, to = np.unravel_index(after.argmin(), after.shape)
        if after[at, to] < gap - 1e-6 * max(gap, 1.0):
            group[own[at]], group[other[to]] = empty, full
            over[full] -= moved[at, to]
            over[empty] += moved[at, to]
            return True
    return False
