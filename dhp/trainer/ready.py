"""From loaded data to the first step: loads the stages, learns what their devices are, says what is expected."""

from __future__ import annotations

from dataclasses import dataclass

from dhp.config.resolve import micro_batches
from dhp.observe.recorder import Recorder
from dhp.step.schedule import Schedule, make_schedule
from dhp.trainer.forecast.planned import Ahead, costs_ahead, expected, look_ahead
from dhp.trainer.measured import SecondsOfParts
from dhp.trainer.recompute import Recomputing, plans_any
from dhp.trainer.reports import Tracing, compile_notes, device_memory, find_peak, name_kernels, overlap_warning
from dhp.trainer.session import Session
from dhp.trainer.settings import measures
from dhp.trainer.table import table_of_training


@dataclass(frozen=True)
class Ready:
    """What goes along with the steps of a started session.

    peak: operations a second of all devices; None: not known. recomputing: chooses what layers recompute, where it is
    chosen. seconds: learns what parts take, where that is kept. tracing: in a traced run."""

    peak: float | None
    schedule: Schedule
    recomputing: Recomputing | None
    seconds: SecondsOfParts | None
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
    ahead = look_ahead(session, devices, costs=plans_any(config, graph) and config.memory.budget_gib is not None)
    recorder.beside, lines = expected(ahead)
    for line in lines:
        recorder.say(line)
    schedule = make_schedule(config.training.schedule, graph, micro_batches(config))
    seconds = None
    if measures(config) and config.memory.cache_dir is not None:
        seconds = SecondsOfParts(config, graph, session.plan.family, config.memory.cache_dir)
    recomputing = _recomputing(session, recorder, schedule, ahead)
    return Ready(peak, schedule, recomputing, seconds, _tracing(session, recorder))


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
