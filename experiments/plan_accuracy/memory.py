"""Bytes that a plan expects of each stage, beside two counts of the run: what autograd keeps, and all live storages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dhp.engine.kinds import make_rank
from dhp.engine.settings import StageSettings
from dhp.engine.text import TextEngine
from dhp.parallel.recompute.live_storages import LiveStorages
from dhp.planner.rates import Channel, Rates
from dhp.trainer.forecast.machine import FORMATS, Machine
from dhp.trainer.recompute import activation_bytes
from experiments.plan_accuracy.cases import CASES, Case
from experiments.plan_accuracy.layout import Layout, running, save_shape
from experiments.plan_accuracy.seconds import errors_of

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
Row = dict[str, Any]


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
