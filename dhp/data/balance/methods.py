"""Balancing methods by name: loads in, packs out."""

from functools import partial
from math import ceil

import numpy as np
from numba import njit

from dhp.core.kinds import takes
from dhp.data.balance.exchange import exchange
from dhp.data.balance.filling import best_fit, exact_fill
from dhp.data.balance.packs import (
    Limits,
    Loads,
    Method,
    Packs,
    chosen,
    divisible,
    from_groups,
    join,
    least_bins,
    others_than,
    shuffled_steps,
    single,
    whole_shares,
)

PASSES, DIVISIONS = 12, 30  # of the exchange; few items are left to it where loads are whole numbers
FILLED = 0.97  # share of the rows that are completed exactly; after more, the items left would not fit one another
ALONE = 4  # rows of a step for each sample that stands alone: its attention costs more than a row of several samples
RAISED = 0.1  # share of the rows that may be made longer than the usual, to share a step with samples that are
LEVELS = 50  # lengths of raised rows are 1 / LEVELS of the shortest of them apart
FILLS = 3  # times that steps are completed exactly, each from the rows that the time before left over
LIKE_TEXT = 0.004  # rows whose text is within this share of the median are of usual length


def per_modality(loads: Loads, limits: Limits, replicas: int, seed: int) -> Packs:
    """Rows, one for each of `replicas` in a step; steps come in random order. `limits.vision` is kept in the mean."""
    rng = np.random.default_rng(seed)
    samples = rng.permutation(len(loads))
    vision, text = loads.vision[samples], loads.text[samples]
    alone, bins = _rows(vision, text, limits, replicas)
    levels = _levels(text[alone[text[alone] <= limits.text]], bins, replicas)  # no row is made beyond the limit
    rest = others_than(alone, len(text))
    even = _even_rows(vision[rest], text[rest], bins, _raised(levels, vision, text[alone], alone, bins), limits)
    packs = divisible(join([Packs(rest[even.samples], even.ends), single(alone)]), replicas)
    order = _steps(packs, vision, text, [target for target, _ in levels], replicas, rng)
    steps = shuffled_steps(order, packs, replicas, rng)
    return Packs(samples[steps.samples], steps.ends)


def _rows(vision: np.ndarray, text: np.ndarray, limits: Limits, replicas: int) -> tuple[np.ndarray, int]:
    """The samples that are longer than an even row and so stand alone, and the number of rows for the others."""
    alone = np.zeros(len(text), dtype=np.bool_)
    while True:
        rest = ~alone
        others = int(alone.sum())
        rows = least_bins(vision[rest].sum(), text[rest].sum(), limits) + others
        bins = min(ceil(rows / replicas) * replicas - others, int(rest.sum()))
        longer = rest & (text > text[rest].sum() / max(bins, 1))
        if longer.sum() in (0, rest.sum()):
            return np.flatnonzero(alone), bins
        alone |= longer


def _levels(lengths: np.ndarray, bins: int, replicas: int) -> list[tuple[int, int]]:
    """Lengths of raised rows, and how many of each: they fill the steps of the samples that stand alone."""
    if not len(lengths):
        return []
    in_step = min(max(1, replicas // ALONE, ceil(len(lengths) * replicas / (RAISED * bins))), replicas)
    width = max(int(lengths.min()) // LEVELS, 1)
    level_of = -(-lengths // width)
    found = []
    for level in np.unique(level_of):
        held = lengths[level_of == level]
        found.append((int(held.max()), ceil(len(held) / in_step) * replicas - len(held)))
    rows = sum(count for _, count in found)
    return found if rows <= 2 * RAISED * bins else [(target, 0) for target, _ in found]


def _raised(
    levels: list[tuple[int, int]], vision: np.ndarray, lengths: np.ndarray, alone: np.ndarray, bins: int
) -> tuple[np.ndarray, np.ndarray]:
    """Vision and text of each raised row: together with the samples that stand alone they hold as much vision a row as
    all others do."""
    share = round(vision.sum() / (bins + len(alone)))
    visions, below = [], 0
    for target, rows in levels:
        held = vision[alone[(lengths > below) & (lengths <= target)]]
        visions.append(whole_shares(max(share * (rows + len(held)) - int(held.sum()), 0), rows))
        below = target
    texts = [np.full(rows, target) for target, rows in levels]
    empty = np.zeros(0, dtype=np.int64)
    return np.concatenate([empty, *visions]), np.concatenate([empty, *texts])


def _even_rows(
    vision: np.ndarray, text: np.ndarray, bins: int, raised: tuple[np.ndarray, np.ndarray], limits: Limits
) -> Packs:
    """Rows with the vision and text that `raised` says, and all other rows of one length."""
    parts = []
    left = np.arange(len(text))
    if len(raised[1]):
        made = chosen(exact_fill(vision, text, *raised))
        parts, left = [made], others_than(made.samples, len(text))
        bins -= len(made)
    targets = whole_shares(int(text[left].sum()), bins)[: int(FILLED * bins)]
    made = chosen(exact_fill(np.zeros(len(left), dtype=np.int64), text[left], np.zeros(bins, dtype=np.int64), targets))
    parts.append(Packs(left[made.samples], made.ends))
    left = left[others_than(made.samples, len(left))]
    bins = max(bins - len(made), 1)
    if len(left):
        loads = text[left, None].astype(np.float64)
        even = _mended(exchange(loads, bins, loads.sum(axis=0) / bins, (1.0,), PASSES, DIVISIONS), text[left], limits)
        parts.append(Packs(left[even.samples], even.ends))
    return join(parts)


def _mended(packs: Packs, text: np.ndarray, limits: Limits) -> Packs:
    """Packs beyond the limit of text taken apart and fitted anew."""
    over = packs.sums(text) > limits.text
    if limits.soft or not over.any():
        return packs
    left = packs.reordered(np.flatnonzero(over)).samples
    apart = from_groups(best_fit(text[left].astype(np.float64), float(limits.text)))
    return join([packs.reordered(np.flatnonzero(~over)), Packs(left[apart.samples], apart.ends)])


def _steps(
    packs: Packs, vision: np.ndarray, text: np.ndarray, levels: list[int], replicas: int, rng: np.random.Generator
) -> np.ndarray:
    """Order of the packs, `replicas` neighbours a step: of like text, and of even vision as far as that allows."""
    v, t = packs.sums(vision), packs.sums(text)
    usual = np.abs(t / np.median(t) - 1.0) <= LIKE_TEXT
    raised = ~usual & (t > np.median(t)) & (t <= max(levels, default=0))
    group = np.where(raised, np.searchsorted(np.sort(levels), t), -1)
    group[usual] = len(levels)
    steps, left = [], np.zeros(0, dtype=np.int64)
    for number in range(group.max() + 1):  # rows that are too few for a step go on to the next group
        held = rng.permutation(np.concatenate([left, np.flatnonzero(group == number)]))
        held, left = np.split(held, [len(held) // replicas * replicas])
        steps.append(_even_steps(held, v, replicas))
    odd = np.concatenate([left, np.flatnonzero(group < 0)])
    return np.concatenate([*steps, odd[np.argsort(t[odd], kind="stable")]])


def _even_steps(packs: np.ndarray, vision: np.ndarray, replicas: int) -> np.ndarray:
    """The packs in another order, each `replicas` neighbours of as much vision as the next ones. packs: whole steps."""
    v = vision[packs]
    if not v.sum():
        return packs
    # The sum of a step is divisible by its ranks where possible: with one unit more, all ranks wait for one of them.
    made, left = [], np.arange(len(packs))
    for _ in range(FILLS):
        if len(left) < replicas:
            break
        targets = replicas * whole_shares(int(v[left].sum()) // replicas, len(left) // replicas)
        targets[-1] += int(v[left].sum()) % replicas
        filled = chosen(
            exact_fill(np.ones(len(left), dtype=np.int64), v[left], np.full(len(targets), replicas), targets)
        )
        made.append(left[filled.samples])
        left = left[others_than(filled.samples, len(left))]
    if len(left) > replicas:
        loads = v[left, None].astype(np.float64)
        bins = len(left) // replicas
        left = left[exchange(loads, bins, loads.sum(axis=0) / bins, (1.0,), PASSES, moves=False).samples]
    return packs[np.concatenate([*made, left])]


def random_batches(loads: Loads, limits: Limits, replicas: int, seed: int) -> Packs:
    """Samples in random order, `limits.samples` a pack."""
    return cut(np.random.default_rng(seed).permutation(len(loads)), limits.samples)


def cut(order: np.ndarray, size: int) -> Packs:
    """Packs of `size` neighbours in this order each, the last of what is left."""
    ends = np.arange(size, len(order) + size, size).clip(max=len(order))
    return Packs(order.astype(np.int64), ends.astype(np.int64))


def isf(loads: Loads, limits: Limits, replicas: int, seed: int) -> Packs:
    """Packs in random order, which hold all samples. replicas: unused, for the method knows no steps."""
    rng = np.random.default_rng(seed)
    group = np.full(len(loads), -1, dtype=np.int64)
    made = 0
    left = np.arange(len(loads))
    for turn in range(limits.passes):
        left = rng.permutation(left)
        numbers, full = _fill(loads.vision[left], loads.text[left], limits.vision, limits.text, *limits.full)
        keep = full[numbers] if turn < limits.passes - 1 else np.ones(len(left), dtype=np.bool_)
        group[left[keep]] = made + numbers[keep]
        made += len(full)
        left = left[~keep]
        if not len(left):
            break
    packs = from_groups(group)
    return packs.reordered(rng.permutation(len(packs)))


@njit(cache=True)
def _fill(
    vision: np.ndarray, text: np.ndarray, most_vision: int, most_text: int, full_vision: int, full_text: int
) -> tuple[np.ndarray, np.ndarray]:  # pragma: no cover - compiled
    """Number of each sample's pack, and of each pack whether it passes the filter."""
    numbers = np.empty(len(text), np.int64)
    full = np.zeros(len(text), np.bool_)
    pack, v, t = 0, 0, 0
    for i in range(len(text)):
        if (v or t) and (v + vision[i] > most_vision or t + text[i] > most_text):
            full[pack] = v >= full_vision or t >= full_text
            pack, v, t = pack + 1, 0, 0
        numbers[i] = pack
        v += vision[i]
        t += text[i]
    if len(text):
        full[pack] = v >= full_vision or t >= full_text
        pack += 1
    return numbers, full[:pack]


def keep_apart(method: Method, long: int, loads: Loads, limits: Limits, rows: int, seed: int) -> Packs:
    """Packs of `method`, `rows` of them a step, none with samples of `long` tokens or more together with shorter ones.
    Steps come in random order."""
    is_long = loads.text >= long
    parts = [_of_kind(method, loads, limits, rows, seed, np.flatnonzero(kind)) for kind in (is_long, ~is_long)]
    whole = [len(part) // rows * rows for part in parts]
    packs = join(parts)
    numbers = np.split(np.arange(len(packs)), [whole[0], len(parts[0]), len(parts[0]) + whole[1]])
    order = np.concatenate([numbers[0], numbers[2], numbers[1], numbers[3]])
    return shuffled_steps(order, packs, rows, np.random.default_rng(seed))


def _of_kind(method: Method, loads: Loads, limits: Limits, rows: int, seed: int, samples: np.ndarray) -> Packs:
    if not len(samples):
        return Packs(samples, samples)
    packs = divisible(method(Loads(loads.vision[samples], loads.text[samples]), limits, rows, seed), rows)
    return Packs(samples[packs.samples], packs.ends)


BALANCE_METHODS: dict[str, Method] = {"random": random_batches, "isf": isf, "balanced": per_modality}
takes("data.balance", BALANCE_METHODS)


def choose_method(name: str, long: int | None) -> Method:
    """The method of that name. long: tokens from which on samples are kept apart from shorter ones; None: none are."""
    method = BALANCE_METHODS[name]
    return method if long is None else partial(keep_apart, method, long)
