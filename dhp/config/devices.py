"""Devices and links as data, from data sheets."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from dhp.core.errors import ConfigError
from dhp.core.text import did_you_mean, nearest


def shipped_directory() -> Path:
    """The `configs/` that comes with dhp: inside the package when installed, next to it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


DEVICES, LINKS = "devices/devices.json", "devices/links.json"
KINDS = ("stated", "assumed", "measured")
TERA, GIGA, MICRO, GIB = 1e12, 1e9, 1e-6, 2**30
NODE = 8  # devices of a node, where nothing else is said


@dataclass(frozen=True)
class Figure:
    """A number with its origin. kind: stated by a vendor, assumed, or measured; source: where it is from."""

    value: float
    kind: str
    source: str

    def times(self, factor: float) -> Figure:
        """The same figure in another unit."""
        return Figure(self.value * factor, self.kind, self.source)


@dataclass(frozen=True)
class Device:
    """One kind of device.

    names: as torch has them. peaks: operations a second by number format, of dense matrices. memory: bytes that a
    process can take; bandwidth: bytes a second of it. link: the name of the one between devices of a node.

    products, attention: shares of the peak that products of matrices and attention reach; elementwise: of the
    bandwidth."""

    name: str
    names: tuple[str, ...]
    peaks: Mapping[str, Figure]
    memory: Figure
    bandwidth: Figure
    link: str
    products: Figure
    attention: Figure
    elementwise: Figure


@dataclass(frozen=True)
class Link:
    """Between two devices. rate: bytes a second that one device sends, as stated; reached: share of it; latency:
    seconds before the first byte arrives."""

    name: str
    rate: Figure
    reached: Figure
    latency: Figure

    @property
    def bytes_s(self) -> float:
        """Bytes a second that a device really sends."""
        return self.rate.value * self.reached.value


@cache
def known_devices() -> dict[str, Device]:
    """All devices of the table by their short names."""
    table = _read(DEVICES)
    return {entry["name"]: _device(entry, table["reached"]) for entry in table["devices"]}


@cache
def known_links() -> dict[str, Link]:
    """All links of the table by name."""
    return {
        entry["name"]: Link(
            entry["name"],
            Figure(**entry["gb_s"]).times(GIGA),
            Figure(**entry["reached"]),
            Figure(**entry["latency_us"]).times(MICRO),
        )
        for entry in _read(LINKS)["links"]
    }


@cache
def known_peaks() -> dict[tuple[str, str], float]:
    """Operations a second by device name and number format, as vendors state them."""
    return {
        (name, number_format): peak.value
        for device in known_devices().values()
        for name in device.names
        for number_format, peak in device.peaks.items()
    }


def find_device(name: str) -> Device:
    """The device of this short name, or of torch's name for it. Raises ConfigError for one that is not known."""
    known = known_devices()
    by_torch = {torchs: device for device in known.values() for torchs in device.names}
    if name in known or name in by_torch:
        return known.get(name) or by_torch[name]
    raise ConfigError(_unknown("device", name, known, DEVICES))


def find_link(name: str) -> Link:
    """The link of this name. Raises ConfigError for one that is not known."""
    known = known_links()
    if name not in known:
        raise ConfigError(_unknown("link", name, known, LINKS))
    return known[name]


def _unknown(what: str, name: str, known: Mapping[str, Any], table: str) -> str:
    meant = did_you_mean([nearest(name, known)]) or "."
    return (
        f"{what}={name} is not known{meant} Known are {', '.join(known)}. Choose one of them, or add an entry with its "
        f"data sheet's figures to configs/{table}"
    )


def _device(entry: Mapping[str, Any], reached: Mapping[str, Any]) -> Device:
    peaks = dict(entry["peak_tflops"])
    kind, source = peaks.pop("kind"), peaks.pop("source")
    shares = {name: Figure(**entry.get("reached", reached)[name]) for name in ("products", "attention", "elementwise")}
    return Device(
        entry["name"],
        tuple(entry["names"]),
        {number_format: Figure(value * TERA, kind, source) for number_format, value in peaks.items()},
        Figure(**entry["memory_gib"]).times(GIB),
        Figure(**entry["hbm_gb_s"]).times(GIGA),
        entry["link"],
        **shares,
    )


def _read(table: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((shipped_directory() / table).read_text(encoding="utf-8"))
    return found


def nodes(actors: int) -> int | None:
    """Over how many nodes so many actors go in equal groups of at most `NODE`; None: one. A file has it as
    `data: ${nodes:${text.num_actors}}`, so that a degree follows the number of actors."""
    found = next(count for count in range(1, actors + 1) if actors % count == 0 and actors <= count * NODE)
    return found if found > 1 else None
