"""The machine that a run is on: GPUs by their names, a CPU by what was measured of it before."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from dhp.config.devices import Device, find_device, find_link, known_devices
from dhp.config.parts import DECODER, parts, resolved
from dhp.config.schema import Config
from dhp.core.errors import ConfigError
from dhp.core.process import say_nothing
from dhp.core.reports import DeviceInfo
from dhp.models.family import Family
from dhp.planner.measured_rates import MeasuredRates
from dhp.trainer.forecast.loads import RunLoads
from dhp.trainer.forecast.machine import Machine, machine_of
from dhp.trainer.graph import degrees
from dhp.trainer.measured_rates import FILE, Measured, kept_rates, measured_rates

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
            count = loads.pictures.patches / own.data / own.sequence
        found[name] = _power(count)
    return found


def _power(count: float) -> int:
    found = 64
    while found * 1.5 < count and found < 1 << 15:
        found *= 2
    return found


def asked_rates(config: Config, loads: RunLoads, device: str, threads: int) -> Measured:
    """What is measured of a machine for a run."""
    dtypes = {name: part.dtype for name, part in parts(config).items()}
    return Measured(dtypes, rows_of(config, loads), device, threads)


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
    config: Config,
    family: Family,
    devices: Sequence[DeviceInfo],
    node: int,
    threads: int,
    loads: RunLoads,
) -> Machine | None:
    """The machine of a run that has begun; None where nothing is known of its devices. devices: of all ranks. node:
    devices of a node."""
    kinds = {device.kind for device in devices}
    count = len({device.device_id for device in devices}) if CPU not in kinds else len(devices)
    if kinds == {CPU}:
        found = kept_rates(family, asked_rates(config, loads, CPU, threads), folder_of(config))
        return None if found is None else measured_machine(config, found, CPU, count, float("inf"))
    try:
        device = find_device(devices[0].name)
        formats = {part.dtype for part in parts(config).values()}
        return machine_of(device, count, node, find_link(BETWEEN), formats)
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
    return measured_rates(source, family, asked_rates(config, loads, device, threads), folder_of(config), say)


def folder_of(config: Config) -> Path:
    """Where rates are kept."""
    return Path(resolved(config.memory.cache_dir or config.data.cache_dir))
