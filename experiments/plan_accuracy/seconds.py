"""Seconds that a plan expects of a step, by rates that were measured here, beside those that steps take."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Any

from dhp.engine.kinds import make_rank
from dhp.planner.measured_rates import MeasuredRates
from dhp.trainer.forecast.here import CPU, measure_here, measured_machine
from experiments.plan_accuracy.cases import GROUPS, Group, settings_of
from experiments.plan_accuracy.layout import Layout, running, save_shape


def errors_of(rows: Sequence[dict[str, Any]], key: str) -> dict[str, Any]:
    """Of the rows that have one: median and largest of the absolute error, and the least signed one."""
    known = [row[key] for row in rows if row.get(key) is not None]
    return {
        "rows": len(known),
        "median": round(median(map(abs, known)), 5),
        "max": round(max(map(abs, known)), 5),
        "least": round(min(known), 5),
    }


def kendall(predicted: Sequence[float], measured: Sequence[float], alike: float = 0.0) -> float:
    """Kendall's τ: pairs in the same order less those in the other, by all pairs. alike: pairs whose measured values
    differ by less than this share are left out."""
    pairs = [
        (predicted[a] - predicted[b]) * (measured[a] - measured[b])
        for a, b in combinations(range(len(measured)), 2)
        if abs(measured[a] - measured[b]) > alike * min(measured[a], measured[b])
    ]
    return sum((one > 0) - (one < 0) for one in pairs) / len(pairs) if pairs else 1.0


def regret(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """By how much the layout that is predicted to be the fastest takes longer than the fastest one."""
    chosen = min(range(len(predicted)), key=predicted.__getitem__)
    return measured[chosen] / min(measured) - 1


Row = dict[str, Any]
STEPS, ROUNDS, DEVICES = 3, 1, 2
IDLE = 1.5  # processes that want to run, in the last minute, while rates are measured
ALIKE = 0.02  # two layouts whose measured steps differ by less have no order


def layouts_of(group: Group, models: Path) -> dict[str, Layout]:
    """By name. models: folder of those that were made."""
    model = save_shape(models, group.shape)
    cache = f"data.cache_dir={models / 'cache'}"
    return {name: Layout(model, group.load, (*settings_of(group, name), cache)) for name in group.layouts}


def rates_of(layout: Layout) -> MeasuredRates:
    """Of this machine for a layout's rows, measured once for all layouts that have as many."""
    plan = layout.plan
    while os.getloadavg()[0] > IDLE:  # the layouts that were timed before still count
        time.sleep(5)
    return measure_here(plan.config, plan.family, plan.source, layout.loads, CPU, 1)


def time_rows(models: Path, names: Sequence[str] | None = None, rounds: int = ROUNDS) -> Iterator[Row]:
    """A row for each layout of each group, or of those named. Every round visits all layouts of a group in turn."""
    for name in names or GROUPS:
        layouts = layouts_of(GROUPS[name], models)
        rates = rates_of(layouts["DP"])
        seconds: dict[str, list[float]] = {own: [] for own in layouts}
        for _ in range(rounds):
            for own, layout in layouts.items():
                with running(layout, make_rank) as run:
                    seconds[own] += run.train(STEPS)[0]
        for own, layout in layouts.items():
            machine = measured_machine(layout.plan.config, rates, CPU, DEVICES, float("inf"))
            found, took = layout.expected(machine), median(seconds[own])
            yield {
                "mode": "time", "group": name, "layout": own, "predicted_s": round(found.step_s, 4),
                "measured_s": round(took, 4), "error": round(found.step_s / took - 1, 4), "steps": len(seconds[own]),
                "kinds": {kind: round(value, 4) for kind, value in found.kinds().items() if value},
            }  # fmt: skip


def time_scores(rows: Sequence[Row]) -> Iterator[Row]:
    """Errors of all rows; of each group the order of its layouts, and what the choice of the fastest costs."""
    found = errors_of(rows, "error")
    met = found["median"] <= 0.08 and found["max"] <= 0.2
    yield {"mode": "time", "score": "step", **found, "goal": {"median": 0.08, "max": 0.2}, "met": met}
    regrets = []
    for name in dict.fromkeys(row["group"] for row in rows):
        own = [row for row in rows if row["group"] == name]
        both = [row["predicted_s"] for row in own], [row["measured_s"] for row in own]
        tau, lost = kendall(*both, ALIKE), regret(*both)
        regrets.append(lost)
        of = {"group": name, "layouts": len(own), "kendall": round(tau, 3), "regret": round(lost, 4)}
        yield {"mode": "time", "score": "group", **of, "goal": {"kendall": 0.9}, "met": tau >= 0.9}
    of = {"mean": round(mean(regrets), 4), "max": round(max(regrets), 4)}
    met = of["mean"] <= 0.03 and of["max"] <= 0.1
    yield {"mode": "time", "score": "regret", **of, "goal": {"mean": 0.03, "max": 0.1}, "met": met}
