"""Reads the request of `dhp plan`: devices, samples, fixed settings."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dhp.config.devices import NODE, Device, Link, find_device, find_link
from dhp.config.parts import encoders, parts
from dhp.config.schema import Config
from dhp.core.errors import ConfigError
from dhp.models.family import Family
from dhp.plan.bench.machine import CPU, Machine, device_here, machine_of
from dhp.plan.count.samples import (
    COMMENT,
    TABLE_COLUMNS,
    EqualSamples,
    Samples,
    assumed_equal,
    equal_samples,
    made_for,
    read_table,
)
from dhp.plan.search.sample_source import measured_table, why_not_measured

if TYPE_CHECKING:
    from dhp.data.sampling.step_loads import Table

DEVICE, LINK = "h100", "ib400"  # where none is named
_LENGTH = {"tokens": "tokens", "picture": "features", "targets": "targets"}  # names of length= and of EqualSamples


@dataclass(frozen=True)
class PlanRequest:
    """devices: (all, of a node); None: as many as the configuration's. device, link: names; None: `DEVICE`, `LINK`.

    samples: of an epoch. hours: in which they are to be done. lengths: a CSV file; length: of every sample. reserve:
    share of a device's memory that stays free. memory_gib: of a device, in the place of its own.

    fix, free: keys that a search keeps, or may set, whatever the configuration says."""

    devices: tuple[int, int] | None = None
    device: str | None = None
    link: str | None = None
    samples: int | None = None
    hours: float | None = None
    lengths: Path | None = None
    length: EqualSamples | None = None
    reserve: float = 0.05
    memory_gib: float | None = None
    fix: tuple[str, ...] = ()
    free: tuple[str, ...] = ()


def read_request(settings: Sequence[str]) -> tuple[PlanRequest, list[str]]:
    """What is asked, and the other settings: overrides of the configuration. Raises ConfigError."""
    own = {one.name for one in fields(PlanRequest)}
    given = {key: value for key, _, value in (one.partition("=") for one in settings) if key in own}
    values = {key: _READ[key](key, value) for key, value in given.items()}
    request = PlanRequest(**values)
    if request.lengths is not None and request.length is not None:
        raise ConfigError("lengths= has the lengths of all samples, and length= one for every sample; give one of them")
    if request.hours is not None and not request.hours > 0:
        raise ConfigError(f"hours={request.hours}: a time to be done in is more than 0, as hours=24")
    return request, [one for one in settings if one.partition("=")[0] not in own]


def find_machine(request: PlanRequest, config: Config) -> tuple[Machine, list[str]]:
    """The devices that are planned for, by data sheets, and lines about what of them is assumed. Raises ConfigError for
    a device or link that is not known."""
    device, notes = _device(request, config)
    count, node = request.devices or _as_configured(config)
    between, assumed = _link(request)
    if count > node and assumed:
        notes.append(f"link={between.name} between nodes is assumed")
    formats = {part.dtype for part in parts(config).values()}
    machine = machine_of(device, count, node, between, formats, config.cluster.transport)
    machine = replace(machine, reserve=request.reserve)
    return with_memory(request, machine), notes


def with_memory(request: PlanRequest, machine: Machine) -> Machine:
    """The devices with the memory that is asked for, if any."""
    if request.memory_gib is None:
        return machine
    return replace(machine, memory_bytes=request.memory_gib * 2**30)


def measured_device(request: PlanRequest) -> str:
    """What --measure measures: cuda, where GPUs of the table are here, else cpu. Raises ConfigError where another
    device is asked for."""
    here = device_here()
    name = CPU if here is None else here.name
    if request.device is not None and find_device(request.device) != here:
        raise ConfigError(
            f"--measure measures the device that is here, {name}, not device={request.device}. Leave out one of them"
        )
    return CPU if here is None else "cuda"


def _device(request: PlanRequest, config: Config) -> tuple[Device, list[str]]:
    if request.device is not None:
        return find_device(request.device), []
    here = device_here()
    if here is not None:
        return here, []
    on = "no GPU of the table is here"
    if config.cluster.device == "cpu":
        on = "cluster.device=cpu has no data sheet"
    return find_device(DEVICE), [f"device={DEVICE} is assumed: {on}"]


def _link(request: PlanRequest) -> tuple[Link, bool]:
    return find_link(request.link or LINK), request.link is None


def _as_configured(config: Config) -> tuple[int, int]:
    """Devices of a composed configuration, in nodes of up to `NODE`."""
    own = [part.num_actors for part in parts(config).values()]
    return _nodes(max(own) if config.cluster.collocate else sum(own))


def _nodes(count: int) -> tuple[int, int]:
    return count, min(count, NODE)


def _devices(key: str, value: str) -> tuple[int, int]:
    found = re.fullmatch(r"(?:(\d+)[x×])?(\d+)", value)
    numbers = [int(one) for one in found.groups() if one is not None] if found else []
    if not numbers or 0 in numbers:
        raise ConfigError(f"{key}={value} is no number of devices: write {key}=64, or nodes x devices, as {key}=8x8")
    return (numbers[0] * numbers[1], numbers[1]) if len(numbers) == 2 else _nodes(numbers[0])


def _text(key: str, value: str) -> str:
    if not value:
        raise ConfigError(f"{key}= is empty; leave it out, or name one, as {key}={_EXAMPLES[key]}")
    return value


def _names(key: str, value: str) -> tuple[str, ...]:
    return tuple(name for name in re.split(r"[,\s]+", value.strip("[]")) if name)


def _count(key: str, value: str) -> int:
    if not value.isdigit() or not int(value):
        raise ConfigError(f"{key}={value} is no whole number from 1 on, as {key}=100000")
    return int(value)


def _number(key: str, value: str) -> float:
    try:
        return float(value)
    except ValueError as error:
        raise ConfigError(f"{key}={value} is no number; write for example {key}={_EXAMPLES[key]}") from error


def _reserve(key: str, value: str) -> float:
    share = _number(key, value)
    if not 0 <= share < 1:
        raise ConfigError(f"{key}={value}: 0 <= share < 1 of a device's memory stays free; {key}=0.05 is the default")
    return share


def _memory(key: str, value: str) -> float:
    size = _number(key, value)
    if not size > 0:
        raise ConfigError(f"{key}={value}: a device has more than 0 GiB, as {key}=79.1")
    return size


def _path(key: str, value: str) -> Path:
    return Path(_text(key, value))


def _length(key: str, value: str) -> EqualSamples:
    found = {name: number for name, _, number in (one.partition(":") for one in value.split(","))}
    if set(found) - set(_LENGTH) or not all(number.isdigit() for number in found.values()) or "tokens" not in found:
        raise ConfigError(
            f"{key}={value} is no length of a sample: write {key}=tokens:1300,picture:1024,targets:300, all tokens of "
            "one, and of these a picture's, and those that are learned"
        )
    own = {_LENGTH[name]: int(number) for name, number in found.items()}
    own = {"features": 0, "targets": own["tokens"] // 4, **own}
    if own["features"] > own["tokens"] or not 0 < own["targets"] <= own["tokens"]:
        raise ConfigError(
            f"{key}={value}: picture({own['features']}) <= tokens({own['tokens']}) and 0 < targets({own['targets']}) "
            "<= tokens fails: tokens are all of a sample"
        )
    return EqualSamples(**own, why=f"{key}={value}")


_EXAMPLES = {"device": "h100", "link": "ib400", "lengths": "lengths.csv", "hours": "24", "reserve": "0.05"}
_EXAMPLES["memory_gib"] = "79.1"
_READ: dict[str, Callable[[str, str], Any]] = {
    "devices": _devices,
    "device": _text,
    "link": _text,
    "samples": _count,
    "hours": _number,
    "lengths": _path,
    "length": _length,
    "reserve": _reserve,
    "memory_gib": _memory,
    "fix": _names,
    "free": _names,
}


Found = tuple[Samples, "Table | None", str]


def find_samples(request: PlanRequest, config: Config, family: Family, say: Callable[[str], None]) -> Found:
    """Samples, their table where it is known, and where they are from. config: resolved, on one device. Raises
    ConfigError, DataError."""
    equal = _equal(request, config, family)
    if request.lengths is not None:
        table = read_table(request.lengths, family)
        return Samples(family, table, equal), table, f"of {request.lengths}"
    if request.length is not None:
        return equal_samples(config, family, equal), None, equal.why
    absent = why_not_measured(config)
    if absent:
        equal = replace(equal, why=f"assumed: {absent}; say length= or lengths=FILE.csv")
        return equal_samples(config, family, equal), None, "assumed"
    table = measured_table(config, say)
    return Samples(family, table, equal), table, "measured"


def _equal(request: PlanRequest, config: Config, family: Family) -> EqualSamples:
    if request.length is not None:
        return request.length if encoders(config) else replace(request.length, features=0)
    return assumed_equal(config)


def write_lengths(table: Table | None, family: Family, path: Path) -> None:
    """A CSV file that `lengths=` reads, of a model of this family. Raises ConfigError where nothing was measured."""
    if table is None:
        raise ConfigError(f"--lengths-out={path}: the lengths of the samples are assumed, not measured")
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [name for name in TABLE_COLUMNS if name in (table.rows.dtype.names or ())]
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(f"{COMMENT}{made_for(family)}\n")
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows(zip(*(table.rows[name].tolist() for name in names), strict=True))


def seconds_text(seconds: float) -> str:
    """Hours, minutes or seconds, as fits."""
    if seconds >= 3600:
        return f"{seconds / 3600:,.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 90 else f"{ceil(seconds)} s"
