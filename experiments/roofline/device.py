"""What a device is taken to do: the constants of devices.yaml."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import yaml

FILE = Path(__file__).with_name("devices.yaml")


@dataclass(frozen=True)
class Device:
    """TB/s of memory, TFLOP/s of products and of attention, microseconds of the shortest kernel, and the TFLOP/s of the
    data sheet, which MFU is a share of."""

    bandwidth_tb_s: float
    product_tflop_s: float
    attention_tflop_s: float
    launch_us: float
    peak_tflop_s: float

    def seconds(self, kind: str, nbytes: int, flops: int) -> float:
        """Of one kernel."""
        rate = self.attention_tflop_s if kind == "attention" else self.product_tflop_s
        return max(nbytes / (self.bandwidth_tb_s * 1e12), flops / (rate * 1e12), self.launch_us * 1e-6)


def read_device(name: str) -> Device:
    """Raises KeyError for one that the file has not, naming those that it has."""
    table = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    if name not in table:
        raise KeyError(f"{name}: {FILE.name} has {', '.join(table)}; write the device into it, with sources")
    return Device(**{field.name: float(table[name][field.name]["value"]) for field in fields(Device)})
