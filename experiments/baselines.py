"""Baselines of balance and of cuts that no paper's system has, as a module of `plugins`.

`length_group` and `device_group` sort samples inside windows of a random order, as trainers do that group by length.
`balanced_stages` makes packs constant in vision and text, steps of packs that are alike: for a chain of stages that a
pack passes through. Packs are completed exactly in both (`exact_fill`); samples left over are exchanged until their
packs are even (`exchange`). Samples with so much text for their images that no others could fill their pack's vision
are packed by text alone. Nothing is dropped or padded. `profile` and `layers` cut a chain into stages alike in forward
time or layers."""

from collections.abc import Sequence

import numpy as np

import dhp
from dhp.data.balance.exchange import exchange
from dhp.data.balance.filling import best_fit, exact_fill
from dhp.data.balance.methods import cut
from dhp.data.balance.packs import (
    SMALL_UNITS,
    Limits,
    Loads,
    Packs,
    chosen,
    divisible,
    from_groups,
    join,
    least_bins,
    others_than,
    shuffled_steps,
    whole_shares,
)
from dhp.plan.cut.bmp import by_layers, least_variance
from dhp.plan.cut.units import PinnedUnit, Unit

PADDED = ("random", "length_group", "device_group")  # as the trainers that use them do
WINDOW = 50  # steps whose samples are sorted together: the more, the more alike are rows, and the less random
PASSES, DIVISIONS = 20, 5
VISION_WEIGHT = 16.0  # a deviation in vision counts so many times one in text: vision comes in few, large pieces
LIKE_VISION, LIKE_TEXT = 0.005, 0.002  # packs that differ by less than these shares are alike
COSTLY = (0.93, 0.96, 0.98, 0.99)  # quantiles of Σ tokens² that bound the classes of costly packs
CHEAPEST = 0.05  # quantile of text tokens for a unit of vision: what the samples that complete a pack are taken to cost


def balanced_stages(loads: Loads, limits: Limits, replicas: int, seed: int) -> Packs:
    """Packs within both limits, but for samples beyond one, which stand alone; steps in random order."""
    rng = np.random.default_rng(seed)
    samples = rng.permutation(len(loads))
    vision, text = loads.vision[samples], loads.text[samples]
    heavy = _text_heavy(vision, text, limits)
    rest = np.flatnonzero(~heavy)
    bins = least_bins(vision[rest].sum(), text[rest].sum(), limits)
    made = _filled(vision[rest], text[rest], bins)
    left = others_than(made.samples, len(rest))
    even = _exchanged(vision[rest[left]], text[rest[left]], bins - len(made))
    even = Packs(rest[left[even.samples]], even.ends)
    fits = (even.sums(vision) <= limits.vision) & (even.sums(text) <= limits.text) if len(even) else np.zeros(0, bool)
    fitting, others = even.reordered(np.flatnonzero(fits)), even.reordered(np.flatnonzero(~fits))
    apart = np.concatenate([np.flatnonzero(heavy), others.samples])
    targets = _targets(vision[rest], text[rest], bins)
    sizes = np.maximum(text[apart] / max(targets[1], 1.0), vision[apart] / max(targets[0], 1e-9))
    fitted = from_groups(best_fit(sizes, 1.0))
    parts = [Packs(rest[made.samples], made.ends), fitting, Packs(apart[fitted.samples], fitted.ends)]
    alike = group_alike(divisible(join(parts), replicas), vision, text, replicas, rng)
    return Packs(samples[alike.samples], alike.ends)


def group_alike(packs: Packs, vision: np.ndarray, text: np.ndarray, replicas: int, rng: np.random.Generator) -> Packs:
    """Put packs of like vision and text into a step: each `replicas` neighbours of their sorted order. Steps come in
    random order.

    Packs are sorted by vision, then by text, both rounded as coarsely as steps allow: packs that are alike in both stay
    in random order, so a step mixes all other properties of samples."""
    v, t = packs.sums(vision), packs.sums(text)
    vision_class = np.round(v / max(np.median(v), 1) / LIKE_VISION)
    text_class = np.round(t / np.median(t) / LIKE_TEXT)
    order = np.lexsort((rng.random(len(packs)), costly(packs.sums(text**2), COSTLY), text_class, vision_class))
    return shuffled_steps(order, packs, replicas, rng)


def _targets(vision: np.ndarray, text: np.ndarray, bins: int) -> np.ndarray:
    return np.array([vision.sum(), text.sum()], dtype=np.float64) / max(bins, 1)


def _filled(vision: np.ndarray, text: np.ndarray, bins: int) -> Packs:
    """As many packs as possible that hold exactly their share of vision and of text. None where vision comes in small
    units."""
    share = round(vision.sum() / bins)
    if share >= SMALL_UNITS:
        return Packs(np.array([], dtype=np.int64), np.array([], dtype=np.int64))
    targets = whole_shares(int(text.sum()), bins)
    return chosen(exact_fill(vision, text, np.full(bins, share), targets))


def _exchanged(vision: np.ndarray, text: np.ndarray, bins: int) -> Packs:
    if not len(text):
        return Packs(np.array([], dtype=np.int64), np.array([], dtype=np.int64))
    loads = np.stack([vision, text], axis=1).astype(np.float64)
    targets = np.maximum(_targets(vision, text, bins), 1e-9)
    return exchange(loads, max(bins, 1), targets, (VISION_WEIGHT, 1.0), PASSES, DIVISIONS)


def _text_heavy(vision: np.ndarray, text: np.ndarray, limits: Limits) -> np.ndarray:
    """Samples with so much text for their images that no others could fill the vision of their pack: bool [samples]."""
    v, t = _targets(vision, text, least_bins(vision.sum(), text.sum(), limits))
    pictured = vision > 0
    # What vision costs in text at least: image tokens are part of the text.
    tokens_a_unit = np.quantile(text[pictured] / vision[pictured], CHEAPEST) if pictured.any() else 0.0
    return (text > t) | (vision > v) | (t - text < tokens_a_unit * (v - vision))


def length_group(loads: Loads, limits: Limits, replicas: int, seed: int, window: int = WINDOW) -> Packs:
    """Samples of like lengths in a pack: sorted inside windows of a random order, packs in random order again."""
    rng = np.random.default_rng(seed)
    order = _sorted_windows(loads, rng.permutation(len(loads)), limits.samples * replicas * window)
    packs = cut(order, limits.samples)
    return packs.reordered(rng.permutation(len(packs)))


def device_group(loads: Loads, limits: Limits, replicas: int, seed: int, window: int = WINDOW) -> Packs:
    """Samples of like lengths on the devices of a step: each takes one of `replicas` neighbours, several times."""
    rng = np.random.default_rng(seed)
    step = limits.samples * replicas
    order = _sorted_windows(loads, rng.permutation(len(loads)), step * window)
    whole = len(order) // step * step
    neighbours = order[:whole].reshape(-1, replicas)
    grouped = rng.permutation(neighbours).reshape(-1, limits.samples, replicas).transpose(0, 2, 1)
    return cut(np.concatenate([grouped.reshape(-1), order[whole:]]), limits.samples)


def _sorted_windows(loads: Loads, order: np.ndarray, size: int) -> np.ndarray:
    windows = np.arange(len(order)) // size
    return order[np.lexsort((loads.text[order], loads.vision[order], windows))]


def by_profile(units: Sequence[Unit], runs: int, held: PinnedUnit | None = None) -> tuple[int, ...]:
    """The cuts for which the runs' seconds of forward have the least variance. Raises as `by_parameters`."""
    return least_variance(units, runs, held, [unit.forward_s for unit in units])


dhp.BALANCE_METHODS.update(length_group=length_group, device_group=device_group, balanced_stages=balanced_stages)
dhp.PARTITION_METHODS.update(profile=by_profile, layers=by_layers)


def costly(squares: np.ndarray, quantiles: Sequence[float]) -> np.ndarray:
    """Class of each pack by Σ tokens², which is what attention costs: int64 [packs], 0 for most packs. Classes are few
    and small: packs of one class hold samples that are alike, and steps of like samples bias the order of training."""
    return np.searchsorted(np.quantile(squares, quantiles), squares)
