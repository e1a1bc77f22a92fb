"""What was measured of a machine before a run: rates of each part's layers, of the optimizer's update and of sends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dhp.config.devices import Figure
from dhp.planner.rates import Channel, Rates


@dataclass(frozen=True)
class PartRates:
    """Rates at which a part's layers compute on this device, as `Rates` has them.

    update: parameters a second that the optimizer updates. ahead: see `Rates`. rows: tokens or patches with which
    layers were measured. residual: root of the mean squared error with which the rates give the layers' own seconds, as
    a share.
    """

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
