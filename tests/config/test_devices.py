"""The tables of devices and links: every figure has a kind and a source, and a wrong name is answered."""

from __future__ import annotations

import pytest

from dhp.config.devices import GIB, KINDS, Figure, find_device, find_link, known_devices, known_links
from dhp.core.errors import ConfigError

FORMATS = ("bfloat16", "float16", "tfloat32", "float32")


def test_every_figure_has_a_kind_and_a_source() -> None:
    for device in known_devices().values():
        shares = (device.products, device.attention, device.elementwise)
        assert all(0 < share.value < 1 and share.kind in KINDS and share.source for share in shares)
        for figure in (*device.peaks.values(), device.memory, device.bandwidth):
            assert figure.kind in KINDS and figure.source
        assert all(peak.kind == "stated" and peak.source.startswith("NVIDIA ") for peak in device.peaks.values())
        assert device.link in known_links()
    for link in known_links().values():
        assert all(figure.kind in KINDS and figure.source for figure in (link.rate, link.reached, link.latency))


def test_formats_stand_in_order_and_names_are_of_one_device() -> None:
    names = [name for device in known_devices().values() for name in device.names]
    assert len(names) == len(set(names))
    for device in known_devices().values():
        peaks = [device.peaks[one].value for one in FORMATS if one in device.peaks]
        assert peaks == sorted(peaks, reverse=True) and 1e12 < peaks[-1] and peaks[0] < 3e15


def test_figures_have_units() -> None:
    h100, nvlink = find_device("h100"), find_link("nvlink4")
    assert h100.peaks["bfloat16"].value == 989.4e12 and h100.memory == Figure(79.1 * GIB, "assumed", h100.memory.source)
    assert h100.bandwidth.value == 3.35e12 and h100.link == "nvlink4"
    assert (
        nvlink.rate.value == 450e9
        and nvlink.bytes_s == pytest.approx(378e9)
        and nvlink.latency.value == pytest.approx(15e-6)
    )
    assert find_device("NVIDIA H100 80GB HBM3") is h100
    assert find_link("ib400").rate.value == 50e9


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("h1000", "device=h1000 is not known; did you mean h100"),
        ("tpu", "device=tpu is not known. Known are b200, h200"),
    ],
)
def test_an_unknown_device_is_answered_with_the_known_ones(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")) as caught:
        find_device(name)
    assert "add an entry" in str(caught.value) and "configs/devices/devices.json" in str(caught.value)


def test_an_unknown_link_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"link=nvlink is not known; did you mean nvlink.\? Known are .*links.json"):
        find_link("nvlink")
