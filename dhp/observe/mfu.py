"""Model FLOPs utilisation: the share of the devices' peak that went into arithmetic that the model needs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache

from dhp.config.shipped import shipped_directory
from dhp.core.reports import DeviceInfo

TABLE = "devices/peaks.json"
TERA = 1e12


@cache
def known_peaks() -> dict[tuple[str, str], float]:
    """Operations a second by device name and number format, as vendors state them."""
    devices = json.loads((shipped_directory() / TABLE).read_text(encoding="utf-8"))["devices"]
    peaks: dict[tuple[str, str], float] = {}
    for device in devices:
        formats = {key: value * TERA for key, value in device.items() if key not in ("names", "source")}
        peaks |= {(name, key): peak for name in device["names"] for key, peak in formats.items()}
    return peaks


def who_measures(devices: Sequence[DeviceInfo]) -> list[bool]:
    """Which ranks measure: the first on each machine whose CPUs compute, since others would disturb it."""
    ids = [device.device_id for device in devices]
    return [device.kind == "cpu" and ids.index(device.device_id) == n for n, device in enumerate(devices)]


def peak_flops(devices: Sequence[DeviceInfo]) -> float | None:
    """Operations a second of the devices of all ranks together, each counted once, in the fastest format that is used
    on it; None when one of them is not known."""
    fastest: dict[str, float] = {}
    for device in devices:
        peak = _peak(device)
        if peak is not None:
            fastest[device.device_id] = max(peak, fastest.get(device.device_id, 0.0))
    return sum(fastest.values()) if {device.device_id for device in devices} == set(fastest) else None


def unknown_devices(devices: Sequence[DeviceInfo]) -> list[str]:
    """Devices whose peak is not known, with the format that they compute in."""
    known = {device.device_id for device in devices if _peak(device) is not None}
    return sorted({f"{device.name} in {device.format}" for device in devices if device.device_id not in known})


def utilisation(flops: Mapping[str, float], step_s: float, peak: float | None) -> float | None:
    """Useful operations of all parts / those that the devices could do in the time of the step; None where their peak
    is not known, or was measured too low, so that the share would be above 1."""
    share = None if peak is None else sum(flops.values()) / (step_s * peak)
    return None if share is None or share > 1 else share


def _peak(device: DeviceInfo) -> float | None:
    return device.measured if device.kind == "cpu" else known_peaks().get((device.name, device.format))
