"""What a forecast says of a layout in a few lines: whether it fits, how fast it is, what it is for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dhp.config.devices import GIB, NODE, find_device, find_link
from dhp.config.parts import parts
from dhp.plan.bench.machine import (
    ASSUMED,
    BETWEEN,
    CPU,
    Machine,
    asked_rates,
    assumed_cpu,
    device_here,
    folder_of,
    machine_of,
    measured_machine,
)
from dhp.plan.bench.rate_bench import kept_rates
from dhp.plan.count.loads import RunLoads
from dhp.plan.count.samples import Samples
from dhp.plan.forecast.forecast import Forecast, forecast
from dhp.plan.forecast.question import Question, attempt, count_model, is_quick
from dhp.plan.run_plan import RunPlan
from dhp.plan.search.sample_source import assumed_equal, equal_samples

if TYPE_CHECKING:
    from dhp.data.sampling.step_loads import Table


def verdict(plan: RunPlan, table: Table | None = None) -> list[str]:
    """Lines about a run's own layout: on `ASSUMED` devices, or on this machine's CPUs. table: lengths of its samples;
    None: rows are assumed."""
    counted = count_model(plan)
    if not is_quick(plan, counted):
        return ["planned        not yet: python -m dhp plan traces this model, once, and then a dry run says it too"]

    def make() -> tuple[Forecast, Machine]:
        equal = assumed_equal(plan.config)
        samples = Samples(plan.family, table, equal) if table else equal_samples(plan.config, plan.family, equal)
        loads = samples.loads(plan.config)
        machine = _machine(plan, loads)
        return forecast(Question(plan, counted, machine, loads)), machine

    made = attempt(make)
    if isinstance(made, str):
        return [f"planned        not known: {made}"]
    found, machine = made
    lines = [f"planned        {_memory(found, machine)}"]
    here = "" if device_here() is not None else "; no GPU is here"
    if machine.figures:
        lines.append(f"               {_speed(found, machine)}, on {machine} (assumed{here})")
    others = "other devices and the best layout: python -m dhp plan"
    return [*lines, f"               for {others if table is not None else f'your data, {others}'}"]


def _machine(plan: RunPlan, loads: RunLoads) -> Machine:
    config, count = plan.config, plan.graph.device_count()
    formats = {part.dtype for part in parts(config).values()}
    if config.cluster.device != CPU:
        return machine_of(find_device(ASSUMED), count, min(count, NODE), find_link(BETWEEN), formats)
    asked = asked_rates(config, loads, CPU, config.cluster.threads_per_actor or 1)
    kept = kept_rates(plan.family, asked, folder_of(config))
    if kept is not None:
        return measured_machine(config, kept, CPU, count, float("inf"))
    return assumed_cpu(count, formats, float("inf"))


def _memory(found: Forecast, machine: Machine) -> str:
    """`fits: at most 65.3 GiB of 75.1 (79.1 less 5%), at the loss of text`."""
    most, limit = found.peak.total, machine.limit_bytes
    where = f"{size(most)} on the fullest device ({found.peak.name})"
    if limit == float("inf"):
        return where
    room = f"{limit / GIB:.1f} GiB ({machine.memory_bytes / GIB:.1f} less {machine.reserve:.0%})"
    if most > limit:
        return f"does not fit: {where}, {size(most - limit)} more than {room}"
    near = most > machine.sure_bytes
    return f"{'may fit, within the error of this' if near else 'fits'}: {where} of {room}"


def _speed(found: Forecast, machine: Machine) -> str:
    bubble = f", bubble {found.timeline.bubble:.0%}" if found.timeline.bubble >= 0.01 else ""
    return f"{found.step_s:.3g} s a step, {found.tokens_s / machine.count:,.0f} tokens/s a device{bubble}"


def size(count: float) -> str:
    """`65.3 GiB`, below one `12.3 MiB`."""
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / 2**20:.1f} MiB"
