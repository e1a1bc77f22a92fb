"""Utilisation: each device once, peaks of dense matrices from the vendors' tables."""

from __future__ import annotations

import pytest

from dhp.core.reports import DeviceInfo
from dhp.observe.planned import known_peaks, peak_flops, unknown_devices, utilisation, who_measures

H100 = "NVIDIA H100 80GB HBM3"


def gpu(device_id: str, name: str = H100, number_format: str = "bfloat16") -> DeviceInfo:
    return DeviceInfo("cuda", name, device_id, number_format)


def cpu(device_id: str, measured: float | None = None) -> DeviceInfo:
    return DeviceInfo("cpu", "cpu", device_id, "float32", measured)


def test_parts_that_share_devices_count_them_once() -> None:
    assert peak_flops([gpu("a"), gpu("b")]) == 2 * 989.4e12
    assert peak_flops([gpu("a"), gpu("b"), gpu("a"), gpu("b")]) == 2 * 989.4e12


def test_devices_may_differ_and_count_in_the_fastest_format_used_on_each() -> None:
    mixed = [gpu("a", number_format="float32"), gpu("a"), gpu("b", "NVIDIA A100-SXM4-80GB", "float32")]
    assert peak_flops(mixed) == pytest.approx((989.4 + 19.5) * 1e12)
    assert peak_flops(mixed[::-1]) == peak_flops(mixed)


def test_an_unknown_device_makes_the_peak_unknown_and_is_named() -> None:
    devices = [gpu("a"), gpu("b", "Some GPU"), gpu("c", "Some GPU"), gpu("d", H100, "float64")]
    assert peak_flops(devices) is None
    assert unknown_devices(devices) == [f"{H100} in float64", "Some GPU in bfloat16"]
    assert unknown_devices(devices[:1]) == [] and peak_flops([cpu("m")]) is None


def test_one_rank_of_each_machine_measures_its_cpus() -> None:
    devices = [cpu("m"), cpu("m"), cpu("n"), gpu("a"), cpu("m"), cpu("n")]
    assert who_measures(devices) == [True, False, True, False, False, False]
    assert peak_flops([cpu("m", 5e10), cpu("m"), cpu("n", 7e10), cpu("m"), cpu("n")]) == 12e10


def test_utilisation() -> None:
    assert utilisation({"vision": 3e12, "text": 5e12}, 2.0, 16e12) == 0.25
    assert utilisation({"vision": 3e12, "text": 5e12}, 2.0, None) is None
    assert utilisation({"text": 5e12}, 1.0, 5e12) == 1.0
    assert utilisation({"text": 5e12}, 1.0, 4e12) is None  # a peak that was measured on a busy machine


def test_peaks_are_operations_a_second() -> None:
    peaks = known_peaks()
    assert peaks[H100, "tfloat32"] == 494.7e12 and peaks["NVIDIA H200", "float32"] == 67e12
