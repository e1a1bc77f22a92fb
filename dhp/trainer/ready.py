"""Loads stages and forecasts the run before its first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from dhp.config.parts import encoders, parts
from dhp.config.steps import micro_batches
from dhp.core.reports import DeviceInfo
from dhp.observe.recorder import Recorder
from dhp.observe.summary import Planned, PlanVersusRun
from dhp.plan.batches import LOOKED_AT, LOOKING_S
from dhp.plan.bench.machine import CPU, Machine, assumed_cpu, machine_of_run, may_be_known
from dhp.plan.count.costs import StageCosts
from dhp.plan.count.samples import Samples, assumed_equal
from dhp.plan.forecast.forecast import Forecast, forecast
from dhp.plan.forecast.moments import counted_costs
from dhp.plan.run_plan import Question, RunPlan, attempt, is_quick
from dhp.step.schedule import Schedule, make_schedule
from dhp.trainer.recomputing import Recomputing, plans_any
from dhp.trainer.session import Session
from dhp.trainer.settings import table_of_training
from dhp.trainer.step_reports import Tracing, compile_notes, device_memory, find_peak, name_kernels, overlap_warning

if TYPE_CHECKING:
    from dhp.trainer.session import Session

_SENDING = ("sent", "exposed", "sync")  # kinds of seconds in which ranks wait for what they send


def planned_of(found: Forecast, source: str) -> Planned:
    """A forecast as a run records it. source: of its constants."""
    comm_s = {}
    for name, own in found.stages.items():
        each = sum(own.kinds[kind] for kind in _SENDING if kind != "sync")
        comm_s[name] = found.passes[name] * each + own.kinds["sync"]
    return Planned(
        step_s=found.step_s,
        busy_s=found.busy_s,
        comm_s=comm_s,
        bubble=found.timeline.bubble,
        tokens=found.loads.step_tokens or None,
        memory_bytes={name: own.peak.total for name, own in found.memory.items()},
        activation_bytes={name: own.activations for name, own in found.memory.items()},
        memory_kinds={name: dict(own.peak.taken) for name, own in found.memory.items()},
        kinds=found.kinds(),
        source=source,
    )


@dataclass(frozen=True)
class Ahead:
    """What is known of a run that begins. question: None where nothing can be counted quickly; why: then, "" where
    nothing is to be said. source: of the constants; "": they are not of these devices."""

    question: Question | None = None
    why: str = ""
    source: str = ""


def look_ahead(session: Session, devices: Sequence[DeviceInfo], costs: bool = False) -> Ahead:
    """Count what can be counted of a run that begins. devices: of all ranks. costs: those of layers are wanted even
    where nothing is known of the devices."""
    plan, timeout_s = session.plan, session.config.cluster.step_timeout_s
    if not costs and not may_be_known(plan.config, devices):
        return Ahead()
    quick = attempt(partial(is_quick, plan))
    if isinstance(quick, str):
        return Ahead(why=quick)
    if not quick:
        return Ahead(why="`python -m dhp plan` traces this model, once, and runs are planned then")
    columns = session.data.ask("some_lengths", LOOKED_AT, LOOKING_S, timeout_s=timeout_s)
    if not (columns["text"] > 0).any():
        return Ahead(why="no sample's length is known")

    def make() -> Ahead:
        loads = samples_of(plan, columns).loads(plan.config)
        machine = machine_of_run(plan.config, plan.family, devices, session.node_devices, session.threads, loads)
        if machine is None:
            formats = {part.dtype for part in parts(plan.config).values()}
            return Ahead(Question(plan, assumed_cpu(len(devices), formats, float("inf")), loads))
        measured = {figure.kind for figure in machine.figures.values()} == {"measured"}
        source = "rates measured here before" if measured else "rates by data sheets"
        return Ahead(Question(plan, machine, loads), source=source)

    made = attempt(make)
    return Ahead(why=made) if isinstance(made, str) else made


def expected(ahead: Ahead) -> tuple[PlanVersusRun, list[str]]:
    """What is expected of a run, to be held beside what it takes, and lines that say so; nothing where its devices are
    not known."""
    question, why = ahead.question, ahead.why
    if question is not None and ahead.source:
        made = attempt(partial(forecast, question))
        if not isinstance(made, str):
            source = ahead.source
            return PlanVersusRun(planned_of(made, source)), [plan_line(made, question.machine, source)]
        why = made
    return PlanVersusRun(Planned()), [f"not planned: {why}"] if why else []


def costs_ahead(ahead: Ahead) -> dict[str, StageCosts] | None:
    """What layers of each stage cost under each choice of recompute; None where it cannot be counted, as where ranks
    get rows of each other's experts, which no trace has, or no picture is among the samples that were looked at."""
    question = ahead.question
    if question is None or any(stage.degrees.shares_experts for stage in question.plan.graph.stages):
        return None
    if encoders(question.plan.config) and not question.loads.worst.patches:
        return None  # no picture was looked at
    made = attempt(partial(counted_costs, question))
    return None if isinstance(made, str) else made


def samples_of(plan: RunPlan, columns: np.ndarray) -> Samples:
    """Of lengths of some samples (`LENGTH_COLUMNS`); as assumed where there are none."""
    from dhp.data.sampling.step_loads import Table

    usable = columns[columns["text"] > 0]
    short = plan.config.training.batch_size - len(usable)
    if 0 < short < plan.config.training.batch_size:
        usable = np.tile(usable, 1 + -(-short // len(usable)))
    return Samples(plan.family, Table(usable) if len(usable) else None, assumed_equal(plan.config))


def plan_line(found: Forecast, machine: Machine, source: str) -> str:
    """`planned 1.69 s a step, 6,146 tokens/s a device, at most 65.3 GiB a device (measured rates)`."""
    memory = "" if machine.name == CPU else f", {found.peak.total / 2**30:.1f} GiB on the fullest device"
    speed = found.tokens_s / machine.count
    bubble = f", bubble {found.timeline.bubble:.0%}" if found.timeline.bubble >= 0.01 else ""
    return f"planned {found.step_s:.3g} s a step, {speed:,.0f} tokens/s a device{bubble}{memory} ({source})"


@dataclass(frozen=True)
class Ready:
    """What goes along with the steps of a started session.

    peak: operations a second of all devices; None: not known. recomputing: chooses what layers recompute, where it is
    chosen. tracing: in a traced run."""

    peak: float | None
    schedule: Schedule
    recomputing: Recomputing | None
    tracing: Tracing | None


def start_stages(session: Session, recorder: Recorder, steps: int) -> Ready:
    """Load every stage on its actors, for a run of that many steps, and say what will run and how long it is expected
    to take. Raises as the session does."""
    config, graph = session.config, session.graph
    *table, total = table_of_training(session.plan)
    recorder.say("\n".join([total, *(f"{'':9}{line}" for line in table)]))
    recorder.say(session.describe_loading())
    session.start_stages(steps)
    started_s = config.cluster.start_timeout_s
    warning = overlap_warning(config, graph, session.device)
    for line in [*([warning] if warning else []), *compile_notes(config), *name_kernels(session.groups, started_s)]:
        recorder.say(line)
    peak, devices = find_peak(session.groups, started_s, recorder.say)
    ahead = look_ahead(session, devices, costs=plans_any(config, graph))
    recorder.beside, lines = expected(ahead)
    for line in lines:
        recorder.say(line)
    schedule = make_schedule(config.training.schedule, graph, micro_batches(config))
    recomputing = _recomputing(session, recorder, schedule, ahead)
    return Ready(peak, schedule, recomputing, _tracing(session, recorder))


def _recomputing(session: Session, recorder: Recorder, schedule: Schedule, ahead: Ahead) -> Recomputing | None:
    config = session.config
    if not plans_any(config, session.graph):
        return None
    memory = None
    if config.memory.budget_gib is None:
        memory = device_memory(session.groups, config.cluster.start_timeout_s)
    own = (session.plan, session.stages, session.device, schedule, recorder.say, memory)
    return Recomputing(*own, counted=costs_ahead(ahead))


def _tracing(session: Session, recorder: Recorder) -> Tracing | None:
    asked = session.config.training.trace
    if not asked:
        return None
    steps = None if asked is True else range(asked[0], asked[1] + 1)
    traced = session.groups | {"data": session.data}
    writer = recorder.open_trace({name: group.size for name, group in traced.items()})
    return Tracing(traced, writer, session.config.cluster.start_timeout_s, steps)
