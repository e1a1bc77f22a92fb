"""What is expected of a run, for its first lines and beside what it takes."""

from __future__ import annotations

from dhp.config.parts import encoders
from dhp.config.schema import Config
from dhp.core.errors import DhpError
from dhp.models.family import VISION
from dhp.observe.planned import Planned
from dhp.trainer.forecast.forecast import Forecast, Question, count_model, forecast
from dhp.trainer.forecast.loads import RunLoads, even_loads
from dhp.trainer.forecast.machine import Machine
from dhp.trainer.plan import RunPlan
from dhp.trainer.units import assumed_rows

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
        activation_bytes={name: activations(found, name) for name in found.memory},
        kinds=found.kinds(),
        source=source,
    )


def activations(found: Forecast, stage: str) -> float:
    """The most of activations that a rank of a stage has at any moment."""
    moments = found.memory[stage].others
    return max(one.taken.get("activations", 0.0) + one.taken.get("recomputed", 0.0) for one in moments)


def plan_for(plan: RunPlan, machine: Machine, loads: RunLoads | None = None) -> Forecast | str:
    """The forecast of a run, or why there is none. loads: None for rows that are assumed."""
    try:
        return forecast(Question(plan, count_model(plan), machine, loads or assumed_loads(plan)))
    except DhpError as error:
        return str(error)


def assumed_loads(plan: RunPlan) -> RunLoads:
    """Of `dhp.trainer.units.assumed_rows`."""
    config: Config = plan.config
    rows = assumed_rows(config)
    unit = plan.family.tower.merge_unit if VISION in encoders(config) else 1
    replicas = plan.graph.of_part(plan.graph.parts()[-1])[0].degrees.data
    return even_loads(rows.samples, rows.tokens, rows.pictures, rows.targets, replicas, unit)
