"""What is expected of a run, for its first lines and beside what it takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from dhp.core.reports import DeviceInfo
from dhp.observe.planned import Beside, Planned
from dhp.trainer.forecast.forecast import Forecast, forecast
from dhp.trainer.forecast.here import CPU, machine_of_run, may_be_known
from dhp.trainer.forecast.machine import Machine
from dhp.trainer.forecast.question import Question, attempt, count_model, is_quick
from dhp.trainer.forecast.samples import EqualSamples, Samples
from dhp.trainer.plan import RunPlan
from dhp.trainer.units import assumed_rows

if TYPE_CHECKING:
    from dhp.trainer.session import Session

LOOKED_AT, LOOKING_S = 256, 2.0  # samples, and seconds, from which a step is planned where not all lengths are known
_SENDING = ("sent", "exposed", "sync")  # kinds of seconds in which ranks wait for what they send


def planned_of(found: Forecast, source: str) -> Planned:
    """A forecast as a run records it. source: of its constants."""
    comm_s = {}
    for name, own in found.stages.items():
        each = sum(own.kinds[kind] for kind in _SENDING if kind != "sync")
        comm_s[name] = found.micro_batches * each + own.kinds["sync"]
    return Planned(
        step_s=found.step_s,
        busy_s=found.busy_s,
        comm_s=comm_s,
        bubble=found.timeline.bubble,
        tokens=found.loads.step_tokens or None,
        memory_bytes={name: own.peak.total for name, own in found.memory.items()},
        activation_bytes={name: own.activations for name, own in found.memory.items()},
        kinds=found.kinds(),
        source=source,
    )


def expected(session: Session, devices: Sequence[DeviceInfo]) -> tuple[Beside, list[str]]:
    """What is expected of a run that begins, to be held beside what it takes, and lines that say so; nothing where its
    devices are not known. devices: of all ranks."""
    plan, timeout_s = session.plan, session.config.cluster.step_timeout_s
    if not may_be_known(plan.config, devices):
        return Beside(Planned()), []
    counted = count_model(plan)
    if not is_quick(plan, counted):
        return Beside(Planned()), [
            "not planned: `python -m dhp plan` traces this model, once, and runs are planned then"
        ]
    columns = session.data.ask("some_lengths", LOOKED_AT, LOOKING_S, timeout_s=timeout_s)
    if not (columns["text"] > 0).any():
        return Beside(Planned()), ["not planned: no sample's length is known"]

    def make() -> tuple[Forecast, Machine] | None:
        loads = samples_of(plan, columns).loads(plan.config)
        machine = machine_of_run(plan.config, plan.family, devices, session.node_devices, session.threads, loads)
        return None if machine is None else (forecast(Question(plan, counted, machine, loads)), machine)

    made = attempt(make)
    if made is None or isinstance(made, str):
        return Beside(Planned()), [] if made is None else [f"not planned: {made}"]
    found, machine = made
    measured = {figure.kind for figure in machine.figures.values()} == {"measured"}
    source = "rates measured here before" if measured else "rates by data sheets"
    return Beside(planned_of(found, source)), [plan_line(found, machine, source)]


def samples_of(plan: RunPlan, columns: np.ndarray) -> Samples:
    """Of lengths of some samples (`LENGTH_COLUMNS`); as assumed where there are none."""
    from dhp.data.sampling.step_loads import Table

    rows, usable = assumed_rows(plan.config), columns[columns["text"] > 0]
    short = plan.config.training.batch_size - len(usable)
    if 0 < short < plan.config.training.batch_size:
        usable = np.tile(usable, 1 + -(-short // len(usable)))
    equal = EqualSamples(rows.tokens, rows.pictures, rows.targets)
    return Samples(plan.family, Table(usable) if len(usable) else None, equal)


def plan_line(found: Forecast, machine: Machine, source: str) -> str:
    """`planned 1.69 s a step, 6,146 tokens/s a device, at most 65.3 GiB a device (measured rates)`."""
    memory = "" if machine.name == CPU else f", {found.peak.total / 2**30:.1f} GiB on the fullest device"
    speed = found.tokens_s / machine.count
    bubble = f", bubble {found.timeline.bubble:.0%}" if found.timeline.bubble >= 0.01 else ""
    return f"planned {found.step_s:.3g} s a step, {speed:,.0f} tokens/s a device{bubble}{memory} ({source})"
