"""`python -m experiments.plan_accuracy [--only memory|time] [--out FILE] [--plot FILE]`: plans beside runs."""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, cycle
from pathlib import Path
from statistics import mean, median
from typing import Any

from dhp.engine.engines import make_rank
from dhp.engine.stage_settings import StageSettings
from dhp.engine.text_engine import TextEngine
from dhp.parallel.recompute.meter import LiveStorages
from dhp.plan.bench.machine import CPU, FORMATS, Machine, measure_here, measured_machine
from dhp.plan.bench.rate_fit import MeasuredRates
from dhp.plan.count.rates import Channel, Rates
from dhp.trainer.recomputing import activation_bytes
from experiments.plan_accuracy.layout import CASES, GROUPS, Case, Group, Layout, running, save_shape, settings_of
from experiments.published.canvas import TOP, Canvas, beside_panel


def errors_of(rows: Sequence[dict[str, Any]], key: str) -> dict[str, Any]:
    """Of the rows that have one: median and largest of the absolute error, and the least signed one."""
    known = [row[key] for row in rows if row.get(key) is not None]
    return {
        "rows": len(known), "median": round(median(map(abs, known)), 5), "max": round(max(map(abs, known)), 5),
        "least": round(min(known), 5),
    }  # fmt: skip


def orders(predicted: Sequence[float], measured: Sequence[float], alike: float = 0.0) -> list[int]:
    """Of each pair 1 where it is in the same order, -1 in the other, 0 where one has none. alike: pairs whose measured
    values differ by less than this share are left out."""
    pairs = [
        (predicted[a] - predicted[b]) * (measured[a] - measured[b])
        for a, b in combinations(range(len(measured)), 2)
        if abs(measured[a] - measured[b]) > alike * min(measured[a], measured[b])
    ]
    return [(one > 0) - (one < 0) for one in pairs]


def kendall(predicted: Sequence[float], measured: Sequence[float], alike: float = 0.0) -> float:
    """Kendall's τ: the mean of `orders`."""
    found = orders(predicted, measured, alike)
    return sum(found) / len(found) if found else 1.0


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


FORWARD, LOSS, BACKWARD, UPDATE = "forward", "loss", "backward", "update"
MOMENTS = {"forward_step": FORWARD, "backward_step": BACKWARD, "grad_norm_sq": UPDATE, "optimizer_step": UPDATE}


@dataclass(frozen=True)
class Peak:
    """Of a rank in a step. moment: in which it was; shared: bytes at it by the moment that made them."""

    nbytes: int
    moment: str
    shared: dict[str, int]


class CountedRank:
    """An engine with all its methods, whose storages are counted in those of a step."""

    def __init__(self, engine: Any):
        self._engine, self._live = engine, LiveStorages()
        if isinstance(engine, TextEngine):
            engine._share = self._named(LOSS, engine._share)  # type: ignore[method-assign]
        self._live.add_present()

    def __getattr__(self, name: str) -> Any:
        own = getattr(self._engine, name)
        return self._counted(MOMENTS[name], own) if name in MOMENTS else own

    def begin_counting(self) -> None:
        """The peak is of the steps from here on."""
        self._live.begin()

    def peak_bytes(self) -> list[Peak]:
        """The most since `begin_counting`; alone in a list, since a tuple would be as many results."""
        return [Peak(self._live.peak, self._live.peak_moment, dict(self._live.shared))]

    def _named(self, moment: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            with self._live.during(moment):
                return own(*arguments)

        return run

    def _counted(self, moment: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            with self._live.during(moment), self._live:
                self._live.add([_tensors(one) for one in arguments])
                return own(*arguments)

        return run


def _tensors(value: Any) -> Any:
    """What an argument has inside: tensors of a bundle, or of a micro-batch's work."""
    return vars(value) if hasattr(value, "__dict__") else value


def make_counted(settings: StageSettings) -> CountedRank:
    """One rank of a stage, counted."""
    return CountedRank(make_rank(settings))


MEASURED = "memory.accounting=true"


def any_machine() -> Machine:
    """Two devices without libraries' memory. Its speeds are no machine's: bytes do not depend on them."""
    link = Channel(1e9)
    rates = Rates(1e11, 1e11, 1e10, 0.0, link, link, ahead=False)
    return Machine("cpu", 2, 2, dict.fromkeys(FORMATS, rates), float("inf"), link, contexts=False)


def layout_of(case: Case, models: Path) -> Layout:
    """models: folder of those that were made."""
    return Layout(save_shape(models, case.shape), case.load, (MEASURED, *case.settings))


def memory_rows(models: Path, names: list[str] | None = None) -> Iterator[Row]:
    """A row for each stage of each case, or of those named. The second step is counted: states are there."""
    for name in names or CASES:
        layout = layout_of(CASES[name], models)
        expected = layout.expected(any_machine()).memory
        with running(layout, make_counted) as run:
            run.train(1)
            run.tell("begin_counting")
            _, reports = run.train(1)
            answers: dict[str, list[list[Peak]]] = run.ask("peak_bytes")
        saved = activation_bytes(reports) or {}
        for stage, own in expected.items():
            fullest = max((peak for (peak,) in answers[stage]), key=lambda one: one.nbytes)
            yield {
                "mode": "memory", "case": name, "stage": stage,
                "saved_predicted": round(own.activations) if saved.get(stage) else None,
                "saved_measured": saved.get(stage) or None,
                "saved_error": round(own.activations / saved[stage] - 1, 6) if saved.get(stage) else None,
                "live_predicted": round(own.peak.total), "live_measured": fullest.nbytes,
                "live_error": round(own.peak.total / fullest.nbytes - 1, 6), "moment_predicted": own.peak.name,
                "moment_measured": fullest.moment,
                "predicted": {what: round(nbytes) for what, nbytes in own.peak.taken.items() if nbytes},
            }  # fmt: skip


def memory_scores(rows: list[Row]) -> Iterator[Row]:
    """Errors of both counts, each with its goal."""
    for count, middle, most, under in (("saved", 0.001, 0.01, None), ("live", 0.03, 0.08, -0.01)):
        found = errors_of(rows, f"{count}_error")
        met = found["median"] <= middle and found["max"] <= most and (under is None or found["least"] >= under)
        goal = {"median": middle, "max": most, "least": under}
        cases = len({row["case"] for row in rows})
        yield {"mode": "memory", "score": f"{count} bytes", "cases": cases, **found, "goal": goal, "met": met}
    alike = sum(row["moment_predicted"] == row["moment_measured"] for row in rows)
    yield {"mode": "memory", "score": "moment of the peak", "alike": alike, "rows": len(rows)}


COLOURS = ("#00798c", "#d1495b", "#edae49", "#66a182", "#2e4057")
Points = Mapping[str, Sequence[tuple[float, float]]]  # by name, measured and predicted


def panels_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, Points]:
    """By title."""
    memory = [row for row in rows if row["mode"] == "memory" and "case" in row]
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for count in ("saved", "live"):
        for row in memory:
            if row[f"{count}_measured"]:
                part = str(row["stage"]).partition(".")[0]
                pair = (row[f"{count}_measured"] / 1e6, row[f"{count}_predicted"] / 1e6)
                found.setdefault(f"{count} bytes, MB", {}).setdefault(part, []).append(pair)
    for row in rows:
        if "measured_s" in row:
            pair = (row["measured_s"], row["predicted_s"])
            found.setdefault("seconds a step", {}).setdefault(row["group"], []).append(pair)
    return {title: dict(own) for title, own in found.items()}


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Write a PNG."""
    panels = panels_of(rows)
    canvas = Canvas(max(1, len(panels)))
    canvas.text(canvas.left(0), 10, "predicted (up) beside measured (across); the line: equal")
    for at, (title, own) in enumerate(panels.items()):
        left, colours = canvas.left(at), dict(zip(own, cycle(COLOURS)))
        beside_panel(canvas, left, title, [(*pair, colours[name]) for name, pairs in own.items() for pair in pairs])
        for number, (name, colour) in enumerate(colours.items()):
            canvas.dot(left + 12, TOP + 13 + 15 * number, colour)
            canvas.text(left + 20, TOP + 6 + 15 * number, name)
    canvas.save(path)


MEMORY, TIME = MODES = ("memory", "time")


def all_rows(asked: argparse.Namespace, models: Path) -> Iterator[dict[str, Any]]:
    """Rows of the modes that are asked for, and behind each mode's its scores."""
    rows: list[dict[str, Any]] = []
    if asked.only != TIME:
        for row in memory_rows(models, asked.cases):
            rows.append(row)
            yield row
        yield from memory_scores(rows)
    if asked.only != MEMORY:
        timed = []
        for row in time_rows(models, asked.groups, asked.rounds):
            timed.append(row)
            yield row
        yield from time_scores(timed)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.plan_accuracy", description=__doc__)
    parser.add_argument("--only", choices=MODES)
    parser.add_argument("--cases", nargs="+", choices=list(CASES), help="of memory")
    parser.add_argument("--groups", nargs="+", choices=list(GROUPS), help="of time")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of time: visits of each layout")
    parser.add_argument("--out", type=Path, help="file to which the same lines are added")
    parser.add_argument("--plot", type=Path, help="PNG of predicted figures over measured ones; of all rows of --out")
    asked = parser.parse_args(arguments)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for row in all_rows(asked, Path(folder)):
            rows.append(row | {"command": "python -m experiments.plan_accuracy"})
            line = json.dumps(rows[-1], ensure_ascii=False)
            print(line, flush=True)
            if asked.out:
                with asked.out.open("a", encoding="utf-8") as file:
                    file.write(line + "\n")
    if asked.plot:
        draw(rows if asked.out is None else [json.loads(line) for line in asked.out.open(encoding="utf-8")], asked.plot)


if __name__ == "__main__":
    main()
