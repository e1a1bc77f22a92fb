"""The devices that a forecast is for: rates and memory."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from dhp.config.devices import GIB, NODE, Device, Figure, Link, find_device, find_link, known_devices
from dhp.config.parts import DECODER, degrees, parts, resolved
from dhp.config.rules import AUTO
from dhp.config.schema import Config
from dhp.core.errors import ConfigError
from dhp.core.graph import CUDA_IPC, NCCL, SHARED_MEMORY
from dhp.core.process import say_nothing
from dhp.core.reports import DeviceInfo
from dhp.models.family import Family
from dhp.plan.bench.rate_bench import FILE, RateRequest, cached_rates, measured_rates
from dhp.plan.bench.rate_fit import MeasuredRates
from dhp.plan.count.loads import RunLoads
from dhp.plan.count.rates import Channel, Rates, rates_of

# Assumed where nothing was measured. Seconds in which the host launches a layer's forward, of about 15 kernels of 8 µs.
HOST_S = 1.2e-4
ACTION_S = 1.5e-3  # of the driver and a worker, for each forward and backward of a stage
STEP_S = 0.02  # of the driver, for each step: its batch, its reports
HANDOVER = "pcie5"  # the link over which ranks hand tensors on, by way of the host's memory
MAPPED_S = 5e-5  # of a hand-over of a tensor's place in memory of a GPU
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

    figures: where the constants are from, by name."""

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

    @property
    def mapped(self) -> bool:
        """Whether what is handed over stays in the sender's memory until it is used."""
        return self.contexts and self.handover.bytes_s == inf

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

    def channel(self, merged: bool) -> Channel:
        """Of a hand-over. merged: gradients of several micro-batches go back at once (`StageGraph.gradients_merge`),
        for which several GPUs do not use the link between them (`dhp.cluster.gpus.choose_transport`)."""
        host = find_link(HANDOVER)
        if not (merged and self.contexts and self.count > 1) or self.handover.bytes_s <= host.bytes_s:
            return self.handover
        return Channel(host.bytes_s, host.latency.value)

    def __str__(self) -> str:
        nodes = f"{self.nodes} node{'s' * (self.nodes > 1)}"
        return f"{self.count} × {self.name} of {self.memory_bytes / GIB:.0f} GiB ({nodes})"


def machine_of(
    device: Device, count: int, node: int, between: Link, formats: Collection[str], transport: str = SHARED_MEMORY
) -> Machine:
    """From the tables of devices and links. count: devices in all; node: of a node; between: nodes. formats: that are
    to be known. transport: of a run, as its configuration names it. Raises ConfigError where the device has no peak in
    one."""
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
        _handover(transport, count, find_link(device.link) if count <= node else between),
        figures=figures,
    )


def _handover(transport: str, count: int, link: Link) -> Channel:
    """As `dhp.cluster.gpus.choose_transport` chooses on GPUs. link: the slowest between devices of the run."""
    if transport == CUDA_IPC or (transport == AUTO and count == 1):
        return Channel(inf, MAPPED_S)
    hand = link if transport in (AUTO, NCCL) else find_link(HANDOVER)
    return Channel(hand.bytes_s, hand.latency.value)


BETWEEN = "ib400"  # assumed between nodes
CPU = "cpu"
ASSUMED = "h100"  # the device of a run on GPUs, where nothing else is said
_GPUS = "/proc/driver/nvidia/gpus"


def device_here() -> Device | None:
    """The kind of this machine's GPUs, read from the driver's files; None where it has none of the table."""
    torchs = {name: device for device in known_devices().values() for name in device.names}
    for file in sorted(Path(_GPUS).glob("*/information")):
        try:
            named = re.search(r"^Model:\s*(.+?)\s*$", file.read_text(encoding="utf-8"), re.MULTILINE)
        except OSError:
            continue
        if named and named[1] in torchs:
            return torchs[named[1]]
    return None


def rows_of(config: Config, loads: RunLoads) -> dict[str, int]:
    """Rows that a rank of each part has of a mean micro-batch, by a power of two: near which rates are measured."""
    found = {}
    for name, part in parts(config).items():
        own = degrees(part)
        if name == DECODER:
            count = loads.text.tokens / own.sequence
        else:
            count = loads.passed.patches / own.data / own.sequence
        found[name] = _power(count)
    return found


def _power(count: float) -> int:
    found = 64
    while found * 1.5 < count and found < 1 << 15:
        found *= 2
    return found


def rate_request(config: Config, loads: RunLoads, device: str, threads: int) -> RateRequest:
    """What is measured of a machine for a run."""
    dtypes = {name: part.dtype for name, part in parts(config).items()}
    return RateRequest(dtypes, rows_of(config, loads), device, threads)


def measured_machine(config: Config, rates: MeasuredRates, name: str, count: int, memory_bytes: float) -> Machine:
    """A machine by its measured rates. count: devices."""
    figures = {
        f"{part}.{key}": getattr(own, key)
        for part, own in rates.parts.items()
        for key in ("products", "attention", "elementwise", "host_s", "update")
    }
    return Machine(
        name,
        count,
        count,
        {},
        memory_bytes,
        rates.handover.channel,
        contexts=name != CPU,
        figures=figures,
        measured={part: rates.rates(part, node=count) for part in rates.parts},
    )


def assumed_cpu(count: int, formats: Collection[str], memory_bytes: float) -> Machine:
    """So many CPUs with the rates of `ASSUMED`, for layouts beside each other where nothing was measured."""
    anything = machine_of(find_device(ASSUMED), count, count, find_link(BETWEEN), {"bfloat16"})
    (rates,) = anything.rates.values()
    return Machine(CPU, count, count, dict.fromkeys(formats, rates), memory_bytes, anything.handover, contexts=False)


def may_be_known(config: Config, devices: Sequence[DeviceInfo]) -> bool:
    """Whether `machine_of_run` may know the devices: of a CPU, whether anything was measured here before."""
    return any(device.kind != CPU for device in devices) or (folder_of(config) / FILE).is_file()


def machine_of_run(
    config: Config, family: Family, devices: Sequence[DeviceInfo], node: int, threads: int, loads: RunLoads
) -> Machine | None:
    """The machine of a run that has begun; None where nothing is known of its devices. devices: of all ranks. node:
    devices of a node."""
    kinds = {device.kind for device in devices}
    count = len({device.device_id for device in devices}) if CPU not in kinds else len(devices)
    if kinds == {CPU}:
        found = cached_rates(family, rate_request(config, loads, CPU, threads), folder_of(config))
        return None if found is None else measured_machine(config, found, CPU, count, float("inf"))
    try:
        device = find_device(devices[0].name)
        formats = {part.dtype for part in parts(config).values()}
        return machine_of(device, count, node, find_link(BETWEEN), formats, config.cluster.transport)
    except ConfigError:
        return None


def measure_here(
    config: Config,
    family: Family,
    source: str,
    loads: RunLoads,
    device: str,
    threads: int,
    say: Callable[[str], None] = say_nothing,
) -> MeasuredRates:
    """Rates of this machine for a run, measured now or before. Raises what `measured_rates` raises."""
    return measured_rates(source, family, rate_request(config, loads, device, threads), folder_of(config), say)


def folder_of(config: Config) -> Path:
    """Where rates are kept."""
    return Path(resolved(config.memory.cache_dir or config.data.cache_dir))


def expected_machine(config: Config, family: Family, loads: RunLoads, count: int | None = None) -> Machine:
    """The devices of a run before any is known: `ASSUMED`, or this machine's CPUs, by rates measured before where there
    are any. count: of them; None: as many as the parts' actors need."""
    each = [part.num_actors for part in parts(config).values()]
    count = count or (max(each) if config.cluster.collocate and not config.cluster.chain else sum(each))
    formats = {part.dtype for part in parts(config).values()}
    if config.cluster.device != CPU:
        own = find_device(ASSUMED)
        return machine_of(own, count, min(count, NODE), find_link(BETWEEN), formats, config.cluster.transport)
    rates = cached_rates(
        family, rate_request(config, loads, CPU, config.cluster.threads_per_actor or 1), folder_of(config)
    )
    return assumed_cpu(count, formats, inf) if rates is None else measured_machine(config, rates, CPU, count, inf)
