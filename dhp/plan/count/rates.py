"""Turns operations into seconds by rates of devices and links.

A pass through a layer is products of matrices, attention, elementwise traffic of memory, and what ranks send one
another. What a rank waits for adds up; what may go on at the same time, the host's launching and hidden sends, joins by
a soft maximum, which is a little more than the largest of them: real overlap is never whole."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from dhp.config.devices import Device, Link, find_link
from dhp.core.errors import ConfigError

OVERLAP = 3.0  # exponent of the soft maximum: 6 is nearly the plain one, and fits published step times less well

Operation = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"]


@dataclass(frozen=True)
class Channel:
    """Between two devices: bytes a second that one of them sends, and seconds before the first arrives."""

    bytes_s: float
    latency_s: float = 0.0


@dataclass(frozen=True)
class Rates:
    """What one device does in a second, and how it reaches others.

    products, attention: operations a second of matrices and of attention. elementwise: bytes a second of memory.

    host_s: of launching one layer's forward; a backward takes twice that. ahead: it launches ahead of the device, which
    also sends while it computes; a CPU does one thing after another, and its library (gloo) makes a scatter of sums by
    summing all on every rank.

    inner, outer: between devices of one node, and of two. node: devices of a node.

    update: parameters a second that an optimizer updates; None: as its traffic of memory takes."""

    products: float
    attention: float
    elementwise: float
    host_s: float
    inner: Channel
    outer: Channel
    node: int = 8
    update: float | None = None
    ahead: bool = True

    def channel(self, sent: Transfer) -> Channel:
        """Of a group of ranks. Where it has several devices of each node, each sends through its own adapter."""
        reach = sent.stride * (sent.ranks - 1) + 1
        if reach <= self.node:
            return self.inner
        beside = max(1, self.node // sent.stride)
        return Channel(min(self.inner.bytes_s, beside * self.outer.bytes_s), self.outer.latency_s)


@dataclass(frozen=True)
class Transfer:
    """A collective, or a message, of `ranks` ranks whose devices are `stride` apart.

    nbytes: the whole tensor of an all-reduce, all-gather or reduce-scatter; of the others what one rank sends away or
    keeps. times: how often. again: whether it is sent again where an MLP runs again; None: it belongs to none."""

    operation: Operation
    nbytes: float
    ranks: int
    stride: int = 1
    times: float = 1.0
    again: bool | None = None

    def sent_bytes(self) -> float:
        """That one rank sends, by the standard algorithms (a ring for sums)."""
        if self.operation == "send":
            return self.times * self.nbytes
        others = (self.ranks - 1) / self.ranks
        return self.times * self.nbytes * others * (2 if self.operation == "all-reduce" else 1)

    def seconds(self, rates: Rates) -> float:
        """Of all of them, one after another."""
        if self.operation != "send" and self.ranks < 2:
            return 0.0
        if self.operation == "reduce-scatter" and not rates.ahead:
            return replace(self, operation="all-reduce").seconds(rates)
        channel = rates.channel(self)
        if self.operation == "all-to-all" and channel is not rates.inner:
            return self._exchange_seconds(rates)
        hops = {"all-reduce": 2 * (self.ranks - 1) / 4, "all-to-all": 1.0, "send": 1.0}
        wait = hops.get(self.operation, (self.ranks - 1) / 4) * channel.latency_s
        return self.sent_bytes() / channel.bytes_s + self.times * wait

    def _exchange_seconds(self, rates: Rates) -> float:
        """Of an all-to-all over several nodes: each device sends what leaves the node through its own adapter."""
        beside = max(1, rates.node // self.stride)
        share = self.times * self.nbytes / self.ranks
        inside = share * (beside - 1) / rates.inner.bytes_s
        outside = share * (self.ranks - beside) / rates.outer.bytes_s
        return inside + outside + self.times * rates.outer.latency_s


@dataclass(frozen=True)
class Operations:
    """What a rank does. products, attention: operations. elementwise: bytes read and written. launched: layers' passes
    forward that the host launches. sent: what it waits for; hidden: what goes on beside its own work."""

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    launched: float = 0.0
    sent: tuple[Transfer, ...] = ()
    hidden: tuple[Transfer, ...] = ()

    def __add__(self, other: Operations) -> Operations:
        return Operations(
            self.products + other.products,
            self.attention + other.attention,
            self.elementwise + other.elementwise,
            self.launched + other.launched,
            self.sent + other.sent,
            self.hidden + other.hidden,
        )

    def __mul__(self, factor: float) -> Operations:
        """The same so many times, one after another."""
        done = (self.products * factor, self.attention * factor, self.elementwise * factor, self.launched * factor)
        return Operations(*done, _repeated(self.sent, factor), _repeated(self.hidden, factor))


def _repeated(sends: tuple[Transfer, ...], factor: float) -> tuple[Transfer, ...]:
    return tuple(replace(one, times=one.times * factor) for one in sends)


@dataclass(frozen=True)
class TimeSplit:
    """Seconds of a work by what takes them. total: less than all of them together where some go on at once."""

    products: float
    attention: float
    elementwise: float
    sent: float
    hidden: float
    host: float
    total: float


def spend(work: Operations, rates: Rates) -> TimeSplit:
    """Seconds of a work."""
    parts = (work.products / rates.products, work.attention / rates.attention, work.elementwise / rates.elementwise)
    sent, hidden = (sum(one.seconds(rates) for one in sends) for sends in (work.sent, work.hidden))
    host = work.launched * rates.host_s
    in_turn = sum(parts) + sent
    total = soft_maximum((in_turn, hidden, host)) if rates.ahead else in_turn + host + hidden
    return TimeSplit(*parts, sent, hidden, host, total)


def soft_maximum(values: Iterable[float], exponent: float = OVERLAP) -> float:
    """(Σ vᵖ)^(1/p): of things that go on at once."""
    found = [value for value in values if value > 0]
    most = max(found, default=0.0)
    return float(most * sum((value / most) ** exponent for value in found) ** (1 / exponent)) if most else 0.0


def rates_of(device: Device, number_format: str, host_s: float, node: int, between: Link) -> Rates:
    """Of a kind of device that computes in this format, `node` of them in a node. host_s: see `Rates`. between: nodes.
    Raises ConfigError where the device has no peak in that format."""
    if number_format not in device.peaks:
        raise ConfigError(
            f"device={device.name} has no peak in {number_format}: known are {', '.join(device.peaks)}. Choose one of "
            "them as dtype, or add it to configs/devices/devices.json"
        )
    peak, inner = device.peaks[number_format].value, find_link(device.link)
    return Rates(
        peak * device.products.value,
        peak * device.attention.value,
        device.bandwidth.value * device.elementwise.value,
        host_s,
        Channel(inner.bytes_s, inner.latency.value),
        Channel(between.bytes_s, between.latency.value),
        node,
    )
