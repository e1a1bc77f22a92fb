"""The devices that are planned for, with the rates of the one that is here in the place of a data sheet's."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace

from dhp.config.schema import Config
from dhp.core.process import count_cores, say_nothing
from dhp.models.family import Family
from dhp.planner.measured_rates import MeasuredRates
from dhp.planner.rates import Rates
from dhp.trainer.forecast.here import CPU, measure_here, measured_machine
from dhp.trainer.forecast.machine import Machine
from dhp.trainer.forecast.samples import Samples

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
    the model's layers cannot be measured.
    """
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
