"""Model FLOPs utilisation: the share of the devices' peak that went into arithmetic that the model needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache

from dhp.config.devices import known_devices
from dhp.core.reports import DeviceInfo


@cache
def known_peaks() -> dict[tuple[str, str], float]:
    """Operations a second by device name and number format, as vendors state them."""
    return {
        (name, number_format): peak.value
        for device in known_devices().values()
        for name in device.names
        for number_format, peak in device.peaks.items()
    }


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
