"""The devices that a run will have, and their speed."""

import os
from collections.abc import Callable
from dataclasses import replace

from dhp.cluster.address import LOCAL, chosen_address
from dhp.config.devices import find_device, find_link, known_devices
from dhp.config.parts import parts
from dhp.config.schema import Config
from dhp.core.errors import ConfigError, DhpError
from dhp.core.process import count_cores, say_nothing
from dhp.models.family import Family
from dhp.plan.bench.machine import (
    BETWEEN,
    CPU,
    Machine,
    assumed_cpu,
    device_here,
    folder_of,
    machine_of,
    measure_here,
    measured_machine,
    rate_request,
)
from dhp.plan.bench.rate_bench import cached_rates
from dhp.plan.bench.rate_fit import MeasuredRates
from dhp.plan.count.rates import Rates
from dhp.plan.count.samples import Samples
from dhp.plan.search.space import Subject

GPU = "cuda"


def measured_here(
    assumed: Machine,
    config: Config,
    family: Family,
    source: str,
    samples: Samples,
    device: str,
    say: Callable[[str], None] = say_nothing,
) -> Machine:
    """As many devices as assumed, with rates as measured on this machine, now or before.

    config: resolved, on one device. device: `GPU`, whose memory and links between nodes stay those of the data sheet,
    or `CPU`, of which each rank gets an even share of cores and memory. Raises DhpError where the machine is busy, or
    the model's layers cannot be measured."""
    loads = samples.loads(config)
    if device == CPU:
        threads = config.cluster.threads_per_actor or max(1, count_cores() // assumed.count)
        rates = measure_here(config, family, source, loads, device, threads, say)
        return replace(
            measured_machine(config, rates, CPU, assumed.count, host_bytes() / assumed.count), reserve=assumed.reserve
        )
    rates = measure_here(config, family, source, loads, device, 1, say)
    sheet = next(iter(assumed.rates.values()))
    own = {part: _beside(rates, part, assumed, sheet) for part in rates.parts}
    figures = {
        f"{part}.{key}": getattr(found, key)
        for part, found in rates.parts.items()
        for key in ("products", "attention", "elementwise", "host_s", "update")
    }
    return replace(assumed, measured=own, handover=rates.handover.channel, figures={**assumed.figures, **figures})


def _beside(rates: MeasuredRates, part: str, assumed: Machine, sheet: Rates) -> Rates:
    """Measured rates; links that this machine does not have are the data sheet's."""
    found = rates.rates(part, assumed.node, sheet.outer)
    return found if rates.sums is not None else replace(found, inner=sheet.inner)


def host_bytes() -> float:
    """Memory of this machine."""
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


_OF_RAY = {"A100-80G": "a100", "A100-40G": "a100-40", "GeForce-RTX-4090": "rtx4090"}


def machine_ahead(subject: Subject, samples: Samples, say: Callable[[str], None]) -> tuple[Machine, str]:
    """The devices, and where their constants are from. GPUs are as the data sheet of their kind says, a CPU as it was
    measured before, or is measured now. Raises ConfigError where the devices are not known."""
    config = subject.config
    kind, count, node = _devices(config)
    count = config.cluster.devices or count
    if count < 1:
        raise ConfigError(
            f"layout={config.layout} plans for devices, and none was found. Set cluster.devices, or degrees yourself"
        )
    if kind is None:
        return _cpus(subject, samples, count, say)
    formats = {part.dtype for part in parts(config).values()}
    device = find_device(kind)
    machine = machine_of(device, count, min(count, node), find_link(BETWEEN), formats, config.cluster.transport)
    return machine, "rates by data sheets"


def _devices(config: Config) -> tuple[str | None, int, int]:
    """Kind of GPU, None for CPUs; how many in all; of a node."""
    address, threads = chosen_address(config.cluster.address), config.cluster.threads_per_actor or 1
    if address != LOCAL and not config.training.dry_run:
        from dhp.cluster.placement.nodes import count_devices  # it imports Ray

        found = count_devices(address, config.cluster.device, config.cluster.start_timeout_s)
        if found.kind is None:
            return None, found.count // threads, found.node // threads
        return _name(found.kind), found.count, found.node
    from dhp.cluster.gpus import read_gpus  # it imports torch

    count = 0 if config.cluster.device == CPU else len(read_gpus())
    here = device_here() if count else None
    if here is not None:
        return here.name, count, count
    if count or config.cluster.device == "cuda":
        what = f"the {count} GPUs here are of no kind that configs/devices has" if count else "no GPU is here"
        raise ConfigError(
            f"layout={config.layout}: {what}, so that nothing is known of their speed. Plan for a known kind by "
            "`python -m dhp plan device=NAME devices=N --write FILE.yaml`, or set degrees with layout=given"
        )
    cores = max(1, count_cores() // threads)
    return None, cores, cores


def _name(kind: str) -> str:
    """Of the table of devices, from Ray's name of a kind, as A100-80G: of those that begin alike the one with least
    memory, for the name may say no more."""
    if kind in _OF_RAY:
        return _OF_RAY[kind]
    known, short = known_devices(), kind.lower()
    own = [name for name in known if name == short or name.startswith(f"{short}-")]
    return min(own, key=lambda name: known[name].memory.value, default=kind)


def _cpus(subject: Subject, samples: Samples, count: int, say: Callable[[str], None]) -> tuple[Machine, str]:
    plain = subject.plain
    cluster = replace(
        plain.cluster, threads_per_actor=plain.cluster.threads_per_actor or max(1, count_cores() // count)
    )
    plain = replace(plain, cluster=cluster)
    asked = rate_request(plain, samples.loads(plain), CPU, cluster.threads_per_actor or 1)
    known, memory = cached_rates(subject.family, asked, folder_of(plain)), host_bytes() / count
    if known is not None:
        return measured_machine(plain, known, CPU, count, memory), "rates measured here before"
    assumed = assumed_cpu(count, {part.dtype for part in parts(plain).values()}, memory)
    try:
        return measured_here(assumed, plain, subject.family, subject.source, samples, CPU, say), "rates measured here"
    except DhpError as error:
        say(f"rates are a GPU's, assumed in the place of this CPU's: {error}")
        return assumed, "rates assumed"
