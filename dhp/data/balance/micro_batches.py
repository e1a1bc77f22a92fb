"""Rows of a step over its micro-batches."""

import numpy as np

from dhp.data.balance.packs import Packs

EVENED = (
    "balanced",
)  # methods whose steps are evened over micro-batches; ISF's rows stay as published, random ones so


def even_micro_batches(packs: Packs, vision: np.ndarray, rows: int, replicas: int) -> Packs:
    """The same steps of `rows` packs, each in `micro_batch_order`; a last step of fewer packs stays as it is.

    vision: int64 [samples], loads."""
    whole = len(packs) // rows * rows
    of_steps = packs.sums(vision)[:whole].reshape(-1, rows)
    orders = [start + micro_batch_order(own, replicas) for start, own in zip(range(0, whole, rows), of_steps)]
    return packs.reordered(np.concatenate([*orders, np.arange(whole, len(packs))]))


def micro_batch_order(vision: np.ndarray, replicas: int) -> np.ndarray:
    """The rows of a step in an order in which each `replicas` neighbours, a micro-batch, have as much vision as the
    next ones, as far as whole rows allow; the last micro-batch may have fewer rows, and then has its share.

    vision: int64 [rows], what each row holds. The largest rows go first, each to the micro-batch that lacks most; then
    two rows change places between the fullest and the emptiest one as long as both come nearer."""
    count = -(-len(vision) // replicas)
    if count < 2:
        return np.arange(len(vision))
    room = np.full(count, replicas)
    room[-1] = len(vision) - (count - 1) * replicas
    over = -vision.sum() * room / len(vision)  # what each micro-batch has beyond its share
    group = np.empty(len(vision), dtype=np.int64)
    for row in np.argsort(-vision, kind="stable"):
        group[row] = least = int(np.where(room > 0, over, np.inf).argmin())
        over[least] += vision[row]
        room[least] -= 1
    while _exchange(vision, group, over):
        pass
    return np.argsort(group, kind="stable")


def _exchange(vision: np.ndarray, group: np.ndarray, over: np.ndarray) -> bool:
    """Let two rows change places between the fullest and the emptiest micro-batch; False where none makes them more
    even."""
    most, least = int(over.argmax()), int(over.argmin())
    gap = over[most] - over[least]
    full, empty = np.flatnonzero(group == most), np.flatnonzero(group == least)
    moved = vision[full][:, None] - vision[empty]
    after = np.abs(gap - 2 * moved)
    one, other = np.unravel_index(after.argmin(), after.shape)
    if after[one, other] >= gap - 1e-6 * max(gap, 1.0):
        return False
    group[full[one]], group[empty[other]] = least, most
    over[most] -= moved[one, other]
    over[least] += moved[one, other]
    return True
