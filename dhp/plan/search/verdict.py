"""Says a forecast in a few lines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dhp.config.devices import GIB
from dhp.core.text import binary_size
from dhp.plan.bench.machine import Machine, device_here, expected_machine
from dhp.plan.count.samples import Samples, assumed_equal, equal_samples
from dhp.plan.forecast.forecast import Forecast, forecast
from dhp.plan.run_plan import Question, RunPlan, attempt, is_quick

if TYPE_CHECKING:
    from dhp.data.sampling.step_loads import Table


@dataclass(frozen=True)
class Expected:
    """What is expected of a run before it begins. question, forecast: None where it is not known; why: then."""

    question: Question | None = None
    forecast: Forecast | None = None
    why: str = ""


def expect(plan: RunPlan, table: Table | None = None) -> Expected:
    """Of a run's own layout: on `ASSUMED` devices, or on this machine's CPUs. table: lengths of its samples; None: rows
    are assumed."""
    if not is_quick(plan):
        return Expected(why="not yet: python -m dhp plan traces this model, once, and then a dry run says it too")

    def make() -> Expected:
        equal = assumed_equal(plan.config)
        samples = Samples(plan.family, table, equal) if table else equal_samples(plan.config, plan.family, equal)
        loads = samples.loads(plan.config)
        question = Question(plan, expected_machine(plan.config, plan.family, loads, plan.graph.device_count()), loads)
        return Expected(question, forecast(question))

    made = attempt(make)
    return Expected(why=f"not known: {made}") if isinstance(made, str) else made


def verdict(expected: Expected, measured: bool = False) -> list[str]:
    """Lines of what is expected. measured: of samples whose lengths are known."""
    found, question = expected.forecast, expected.question
    if found is None or question is None:
        return [f"planned        {expected.why}"]
    machine = question.machine
    lines = [f"planned        {_memory(found, machine)}"]
    here = "" if device_here() is not None else "; no GPU is here"
    if machine.figures:
        lines.append(f"               {_speed(found, machine)}, on {machine} (assumed{here})")
    others = "other devices and the best layout: python -m dhp plan"
    return [*lines, f"               for {others if measured else f'your data, {others}'}"]


def _memory(found: Forecast, machine: Machine) -> str:
    """`fits: at most 65.3 GiB of 75.1 (79.1 less 5%), at the loss of text`."""
    most, limit = found.peak.total, machine.limit_bytes
    where = f"{binary_size(most)} on the fullest device ({found.peak.name})"
    if limit == float("inf"):
        return where
    room = f"{limit / GIB:.1f} GiB ({machine.memory_bytes / GIB:.1f} less {machine.reserve:.0%})"
    if most > limit:
        return f"does not fit: {where}, {binary_size(most - limit)} more than {room}"
    near = most > machine.sure_bytes
    return f"{'may fit, within the error of this' if near else 'fits'}: {where} of {room}"


def _speed(found: Forecast, machine: Machine) -> str:
    bubble = f", bubble {found.timeline.bubble:.0%}" if found.timeline.bubble >= 0.01 else ""
    return f"{found.step_s:.3g} s a step, {found.tokens_s / machine.count:,.0f} tokens/s a device{bubble}"
