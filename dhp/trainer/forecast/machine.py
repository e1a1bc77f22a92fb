"""The devices that a forecast is for: what each does in a second, its memory, what a run costs beside its work."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from dhp.config.devices import GIB, Device, Figure, Link, find_link
from dhp.core.errors import ConfigError
from dhp.planner.rates import Channel, Rates, rates_of

# Assumed where nothing was measured. Seconds in which the host launches a layer's forward, of about 15 kernels of 8 µs.
HOST_S = 1.2e-4
ACTION_S = 1.5e-3  # of the driver and a worker, for each forward and backward of a stage
STEP_S = 0.02  # of the driver, for each step: its batch, its reports
HANDOVER = "pcie5"  # the link over which ranks hand tensors on, by way of the host's memory
SURE = 0.03  # of the limit: a prediction that is nearer to it says nothing for certain
FORMATS = ("bfloat16", "float32", "float64")


@dataclass(frozen=True)
class Machine:
    """Devices of one kind.

    rates: by number format; measured: of a part, where they were measured on this machine. memory_bytes: of a device,
    that a process can take; reserve: the share of it that is to stay free.

    handover: between two stages. action_s, step_s: seconds that each action of the schedule, and each step, takes
    beside the devices' work.

    contexts: processes take memory for a context and communicators, as on GPUs.

    figures: where the constants are from, by name.
    """

    name: str
    count: int
    node: int
    rates: Mapping[str, Rates]
    memory_bytes: float
    handover: Channel
    action_s: float = ACTION_S
    step_s: float = STEP_S
    reserve: float = 0.05
    contexts: bool = True
    figures: Mapping[str, Figure] = field(default_factory=dict)
    measured: Mapping[str, Rates] = field(default_factory=dict)

    @property
    def nodes(self) -> int:
        return -(-self.count // self.node)

    @property
    def limit_bytes(self) -> float:
        """What a layout may take on a device."""
        return self.memory_bytes * (1 - self.reserve)

    @property
    def sure_bytes(self) -> float:
        """What it may take for certain: less, by the error of a forecast."""
        return self.limit_bytes * (1 - SURE)

    def of(self, part: str, name: str) -> Rates:
        """The rates of a part that computes in a number format. Raises ConfigError where there are none."""
        if part in self.measured:
            return self.measured[part]
        if name not in self.rates:
            raise ConfigError(
                f"device={self.name} has no rates in {name}: known are {', '.join(self.rates)}. Choose one of them as "
                "dtype, or measure them with --measure"
            )
        return self.rates[name]

    def __str__(self) -> str:
        nodes = f"{self.nodes} node{'s' * (self.nodes > 1)}"
        return f"{self.count} × {self.name} of {self.memory_bytes / GIB:.0f} GiB ({nodes})"


def machine_of(device: Device, count: int, node: int, between: Link, formats: Collection[str]) -> Machine:
    """From the tables of devices and links. count: devices in all; node: of a node; between: nodes. formats: that are
    to be known. Raises ConfigError where the device has no peak in one."""
    hand = find_link(HANDOVER)
    figures = {
        "memory": device.memory,
        "bandwidth": device.bandwidth,
        "products": device.products,
        "attention": device.attention,
        "elementwise": device.elementwise,
        "link": find_link(device.link).rate,
        "between nodes": between.rate,
        "host_s": Figure(HOST_S, "assumed", "15 kernels of 8 µs a layer"),
        "action_s": Figure(ACTION_S, "assumed", "two messages of a driver"),
        "step_s": Figure(STEP_S, "assumed", "a driver's work for a step"),
    }
    return Machine(
        device.name,
        count,
        node,
        {name: rates_of(device, name, HOST_S, node, between) for name in formats},
        device.memory.value,
        Channel(hand.bytes_s, hand.latency.value),
        figures=figures,
    )
