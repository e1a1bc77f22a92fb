"""Fits a device's rates to measured seconds, and keeps them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import chain, combinations
from typing import Any

import numpy as np

from dhp.config.devices import Figure
from dhp.core.errors import DhpError
from dhp.plan.count.rates import OVERLAP, Channel, Operation, Operations, Rates, Transfer, spend

NO_CHANNEL = Channel(math.inf)  # sends cost nothing
_DEVICE = ("products", "attention", "elementwise")
_LEAST_SHARE = 1e-3  # of the seconds of some work, that each of what it has takes at least: rates are finite
_GRID, _SEARCHES = 48, 80  # tries of the host's seconds, and steps of the search between the best ones


@dataclass(frozen=True)
class Observation:
    """Work, and the seconds that it took. weight: of its relative error beside others'."""

    work: Operations
    seconds: float
    weight: float = 1.0


def fit_rates(observations: Sequence[Observation], ahead: bool = True) -> Rates:
    """The rates whose `spend` of the works is nearest to their seconds; works send nothing. ahead: see `Rates`. What no
    work has is given an infinite rate. Raises DhpError for seconds that are not positive."""
    broken = [one.seconds for one in observations if not 0 < one.seconds < math.inf]
    if broken or not observations:
        raise DhpError(
            f"rates are solved for from measured seconds, but {len(broken)} of {len(observations)} are not positive: "
            f"{broken[:3]}. Measure again, with more rows"
        )
    if not ahead:
        return _solve_in_turn(observations)
    best = _search(lambda host_s: _loss(_solve(observations, host_s), observations), _most_host(observations))
    return _solve(observations, best)


def errors(rates: Rates, observations: Sequence[Observation]) -> list[float]:
    """Of each observation, what `spend` says beyond its seconds, as a share of them."""
    return [spend(one.work, rates).total / one.seconds - 1 for one in observations]


def residual(rates: Rates, observations: Sequence[Observation]) -> float:
    """The root of the mean squared error."""
    found = errors(rates, observations)
    return math.sqrt(math.fsum(one * one for one in found) / len(found))


def fit_channel(operation: Operation, ranks: int, measured: Sequence[tuple[float, float]]) -> Channel:
    """The channel by which `Transfer` of this operation takes these seconds, measured as pairs (bytes, seconds) of two
    sizes. A latency is never negative: where the larger size takes more than its share, it alone decides. Raises
    DhpError for seconds that do not grow with the bytes."""
    (small, large), ideal = sorted(measured), Rates(1.0, 1.0, 1.0, 0.0, NO_CHANNEL, NO_CHANNEL)
    waits = Transfer(operation, 0.0, ranks).seconds(replace(ideal, inner=Channel(math.inf, 1.0)))
    sent = [Transfer(operation, nbytes, ranks).sent_bytes() for nbytes, _ in (small, large)]
    more = large[1] - small[1]
    if more <= 0 or sent[1] <= sent[0]:
        raise DhpError(
            f"{operation} of {large[0]:,.0f} bytes took {large[1]:.2g} s, and of {small[0]:,.0f} bytes {small[1]:.2g} "
            "s: that is no rate. Something else was busy on this machine; measure again when it is idle"
        )
    bytes_s = (sent[1] - sent[0]) / more
    latency_s = (small[1] - sent[0] / bytes_s) / waits
    return Channel(bytes_s, latency_s) if latency_s >= 0 else Channel(sent[1] / large[1])


def _most_host(observations: Sequence[Observation]) -> float:
    """No more seconds of launching than each work takes."""
    return min((one.seconds / one.work.launched for one in observations if one.work.launched), default=0.0)


def _search(loss: Callable[[float], float], most: float) -> float:
    """Where the loss is least between 0 and `most`: of equals the smaller."""
    points = [0.0, *(most * 10 ** (-4 + 4 * at / (_GRID - 1)) for at in range(_GRID))] if most else [0.0]
    losses = [loss(point) for point in points]
    at = min(range(len(points)), key=losses.__getitem__)
    low, high = points[max(0, at - 1)], points[min(len(points) - 1, at + 1)]
    for _ in range(_SEARCHES):
        one, two = low + (high - low) * 0.382, low + (high - low) * 0.618
        low, high = (low, two) if loss(one) <= loss(two) else (one, high)
    middle = (low + high) / 2
    return middle if loss(middle) < losses[at] * (1 - 1e-9) else points[at]


def _loss(rates: Rates, observations: Sequence[Observation]) -> float:
    found = zip(errors(rates, observations), observations, strict=True)
    return math.fsum(one.weight * error * error for error, one in found)


def _solve(observations: Sequence[Observation], host_s: float) -> Rates:
    """The best rates of the device with these seconds of launching."""
    rows, wanted = [], []
    for one in observations:
        busy = one.seconds**OVERLAP - (one.work.launched * host_s) ** OVERLAP
        counts = _counts(one.work)
        if busy <= 0 or not any(counts):
            continue
        seconds = busy ** (1 / OVERLAP)
        # How much of an error of these seconds is one of the whole.
        scale = math.sqrt(one.weight) * (seconds / one.seconds) ** (OVERLAP - 1) / one.seconds
        rows.append([scale * count for count in counts])
        wanted.append(scale * seconds)
    found = _not_negative(np.array(rows), np.array(wanted)) if rows else [0.0] * len(_DEVICE)
    return _rates(observations, found, host_s, True)


def _solve_in_turn(observations: Sequence[Observation]) -> Rates:
    """The best rates where launching adds to the rest."""
    scales = [math.sqrt(one.weight) / one.seconds for one in observations]
    rows = [
        [scale * count for count in (*_counts(one.work), one.work.launched)]
        for scale, one in zip(scales, observations, strict=True)
    ]
    *found, host_s = _not_negative(np.array(rows), np.sqrt([one.weight for one in observations]))
    return _rates(observations, found, host_s, False)


def _counts(work: Operations) -> list[float]:
    return [getattr(work, name) for name in _DEVICE]


def _rates(observations: Sequence[Observation], found: Sequence[float], host_s: float, ahead: bool) -> Rates:
    """found: seconds of one product, one operation of attention, one byte."""
    least = [_least_cost(observations, name) for name in _DEVICE]
    costs = [max(own, floor) for own, floor in zip(found, least, strict=True)]
    products, attention, elementwise = (1 / cost if cost else math.inf for cost in costs)
    return Rates(products, attention, elementwise, host_s, NO_CHANNEL, NO_CHANNEL, ahead=ahead)


def _least_cost(observations: Sequence[Observation], name: str) -> float:
    """Seconds of one of `name` at least, 0 where no work has any."""
    counted = [(one.seconds, getattr(one.work, name)) for one in observations]
    return _LEAST_SHARE * min((seconds / count for seconds, count in counted if count), default=0.0)


def _not_negative(rows: np.ndarray, wanted: np.ndarray) -> list[float]:
    """Least squares of rows @ x = wanted with x ≥ 0. There are four unknowns at most, so all sets of those that are
    not zero are tried."""
    scales = np.linalg.norm(rows, axis=0)
    columns = [at for at in range(rows.shape[1]) if scales[at] > 0]
    best, least = np.zeros(rows.shape[1]), float(wanted @ wanted)
    for chosen in chain.from_iterable(combinations(columns, size) for size in range(1, len(columns) + 1)):
        own = list(chosen)
        solved = np.linalg.lstsq(rows[:, own] / scales[own], wanted, rcond=None)[0]
        loss = float(np.sum((rows[:, own] / scales[own] @ solved - wanted) ** 2))
        if (solved >= 0).all() and loss < least:
            best, least = np.zeros(rows.shape[1]), loss
            best[own] = solved / scales[own]
    return [float(one) for one in best]


@dataclass(frozen=True)
class PartRates:
    """Rates at which a part's layers compute on this device, as `Rates` has them.

    update: parameters a second that the optimizer updates. ahead: see `Rates`. rows: tokens or patches with which
    layers were measured. residual: root of the mean squared error with which the rates give the layers' own seconds, as
    a share."""

    products: Figure
    attention: Figure
    elementwise: Figure
    host_s: Figure
    update: Figure
    rows: tuple[int, ...]
    residual: float
    ahead: bool


@dataclass(frozen=True)
class MeasuredChannel:
    """A `Channel`: bytes a second, and seconds before the first arrives."""

    bytes_s: Figure
    latency_s: Figure

    @property
    def channel(self) -> Channel:
        """Without origins."""
        return Channel(self.bytes_s.value, self.latency_s.value)


@dataclass(frozen=True)
class MeasuredRates:
    """parts: by name. sums: of all-reduces between two devices of this machine; None where it has one alone. handover:
    of tensors from one process to another through memory of the host that both have."""

    parts: Mapping[str, PartRates]
    sums: MeasuredChannel | None
    handover: MeasuredChannel

    def rates(self, part: str, node: int = 1, outer: Channel | None = None) -> Rates:
        """Of this part's ranks. node: devices of a node; outer: between nodes. Where no sums were measured, or no
        outer channel is given, the channel is that of hand-overs, or the inner one."""
        own, inner = self.parts[part], (self.sums or self.handover).channel
        speeds = (own.products.value, own.attention.value, own.elementwise.value, own.host_s.value)
        return Rates(*speeds, inner, outer or inner, node, own.update.value, own.ahead)

    def to_json(self) -> dict[str, Any]:
        """Plain values for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> MeasuredRates:
        """The inverse of `to_json`. Raises KeyError and TypeError for values of another form."""
        parts = {name: _part(own) for name, own in values["parts"].items()}
        sums = values["sums"]
        return cls(parts, None if sums is None else _channel(sums), _channel(values["handover"]))


def _part(values: Mapping[str, Any]) -> PartRates:
    figures = {name: Figure(**own) for name, own in values.items() if isinstance(own, Mapping)}
    return PartRates(**figures, rows=tuple(values["rows"]), residual=values["residual"], ahead=values["ahead"])


def _channel(values: Mapping[str, Any]) -> MeasuredChannel:
    return MeasuredChannel(Figure(**values["bytes_s"]), Figure(**values["latency_s"]))
