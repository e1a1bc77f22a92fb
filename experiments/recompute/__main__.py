"""`python -m experiments.recompute [--rounds N]`: seconds of a step with everything recomputed, with nothing, and with
what the planner makes of half of the memory between."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from dhp.core.batch import StepData
from dhp.core.reports import StageUsage
from dhp.engine.encoder_engine import EncoderEngine
from dhp.engine.stage_settings import OptimizerSettings
from dhp.engine.text_engine import TextEngine
from dhp.models.registry import load_family
from dhp.plan.count.costs import Arrangement, Plan, StageCosts, predicted_bytes
from dhp.plan.recompute.best_plan import best_plan
from dhp.plan.recompute.planner import Planner, as_text
from dhp.plan.recompute.profile import usage_of
from dhp.step.schedule import make_schedule
from dhp.step.stages import RankGroup, make_stages
from dhp.step.step import train_step
from dhp.trainer.recomputing import arrange
from experiments.pair import ONE, TEXT, VISION, Here, as_batch, join_alone, keep_freed_memory, pair_of, settings_of
from experiments.small import deal, make_samples, save_even_model

TRAINERS = {VISION: EncoderEngine, TEXT: TextEngine}
UPDATE = OptimizerSettings(1e-4, (0.9, 0.999), 1e-8, 0.01, "constant", 0, 10**6, 1.0)
Usages = dict[str, StageUsage | None]
TOWER, DECODER, LAYERS = 512, 640, 8
SAMPLES, SIDE, WORDS = 1, 32, 256
TRIES = 5  # corrections of a plan, at most
FULL, NONE, WHOLE, SELECTED = "full", "none", "auto, whole layers", "auto, selected operations"


@contextmanager
def in_this_process(model: str) -> Iterator[Run]:
    """One rank of each part, without actors: everything recomputed at first, and measured."""
    graph = pair_of(load_family(model))
    with join_alone():
        made = {s: t(settings_of(graph, s, model, UPDATE, "full", measure=True)) for s, t in TRAINERS.items()}
        yield Run(model, {stage: Here(trainer) for stage, trainer in made.items()})


class Run:
    """Steps of a started layout. kinds: of the layers of each part."""

    def __init__(self, model: str, groups: Mapping[str, RankGroup]):
        self._groups, self._graph = groups, pair_of(load_family(model))
        self._stages = make_stages(self._graph, groups)
        self._schedule = make_schedule("sequential", self._graph, 1)
        family = load_family(model)
        self.kinds = {VISION: family.tower.layers.kinds, TEXT: family.decoder.layers.kinds}
        self.arrangement: Arrangement = arrange(self._graph, self._schedule, "cpu")

    def take(self, data: StepData) -> None:
        """The batch of the steps to come."""
        self._batch = as_batch(data)

    def step(self, plan: Plan) -> Usages:
        """One step under the plan; what its fullest ranks took."""
        for stage, group in self._groups.items():
            group.execute_all_async("set_recompute", plan[stage], returns=0)
        reports = train_step(self._stages, self._schedule, self._graph.ties, self._batch).reports
        return {stage: usage_of(refs) for stage, refs in reports.items()}

    def everything(self, choice: str) -> Plan:
        """The plan in which all layers recompute the same."""
        return {stage: (choice,) * len(kinds) for stage, kinds in self.kinds.items()}

    def settle(self, planner: Planner) -> None:
        """Steps until the planner has a plan, which has not been tried yet."""
        while not planner.settled:
            planner.learn(self.step(planner.asked))


def measure(rounds: int) -> Iterator[dict[str, Any]]:
    """A row for whole layers and one for selected operations: ratios are medians over interleaved rounds."""
    torch.set_num_threads(1)  # so that this process's seconds of CPU are those of the work
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        model = save_even_model(Path(folder), TOWER, DECODER, LAYERS)
        with in_this_process(model) as run:
            run.take(deal(model, ONE, ONE, make_samples(SAMPLES, SIDE, WORDS)))
            costs = _measure_costs(run)
            budget = predicted_bytes(costs, _half(run), run.arrangement)
            plans = _plan(run, costs, budget)
            operations = {name: _count_operations(run, plan) for name, plan in plans.items()}
            times = _time(run, plans, rounds)
            peaks = {name: _peak(run, plan) for name, plan in plans.items()}
    for name in (WHOLE, SELECTED):
        yield _row(name, plans[name], budget, peaks[name], operations, times)


def _measure_costs(run: Run) -> dict[str, StageCosts]:
    planner = Planner(run.kinds, {}, run.arrangement, float("inf"))
    run.settle(planner)
    return planner.costs()


def _half(run: Run) -> Plan:
    return {part: _half_of(len(kinds)) for part, kinds in run.kinds.items()}


def _half_of(layers: int) -> tuple[str, ...]:
    return ("all",) * (layers - layers // 2) + ("none",) * (layers // 2)


def _plan(run: Run, costs: Mapping[str, StageCosts], budget: float) -> dict[str, Plan]:
    """Of whole layers the best plan of these costs; of selected operations what the planner comes to."""
    planner = Planner(run.kinds, {}, run.arrangement, budget, known=costs)
    for _ in range(TRIES):
        if not planner.learn(run.step(planner.asked)):
            break
    whole = {part: _whole_only(known) for part, known in costs.items()}
    everything, auto = run.everything("all"), frozenset(run.kinds)
    return {
        FULL: everything, NONE: run.everything("none"),
        WHOLE: best_plan(whole, everything, auto, run.arrangement, budget), SELECTED: planner.asked,
    }  # fmt: skip


def _whole_only(costs: StageCosts) -> StageCosts:
    return replace(costs, layers={kind: {c: of[c] for c in ("none", "all")} for kind, of in costs.layers.items()})


def _time(run: Run, plans: Mapping[str, Plan], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Seconds of the clock and of this process's CPU, of a step under each plan in turn."""
    times = defaultdict(list)
    for _ in range(rounds):
        for name, plan in plans.items():
            clock, cpu = time.perf_counter(), time.process_time()
            run.step(plan)
            times[name].append((time.perf_counter() - clock, time.process_time() - cpu))
    return times


def _count_operations(run: Run, plan: Plan) -> int:
    with FlopCounterMode(display=False, custom_mapping=_ATTENTION) as counter:
        run.step(plan)
    return counter.get_total_flops()


def _attention(query: Any, key: Any, value: Any, dropout: Any = 0, causal: bool = False, **_: Any) -> int:
    return sdpa_flop_count(query, key, value) // (2 if causal else 1)


def _attention_backward(
    gradient: Any, query: Any, key: Any, value: Any, output: Any, sums: Any, dropout: Any, causal: bool, **_: Any
) -> int:
    return 5 * _attention(query, key, value, dropout, causal) // 2  # five products for the two of forward


_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


def _peak(run: Run, plan: Plan) -> int:
    planner = Planner(run.kinds, {}, run.arrangement, float("inf"))
    return planner.measured_bytes(run.step(plan))


def _row(
    name: str, plan: Plan, budget: float, peak: int, operations: Mapping[str, int], times: Mapping[str, Any]
) -> dict[str, Any]:
    bound = operations[FULL] / operations[name]
    ratio = _ratio(times[FULL], times[name], 1)
    return {
        "mode": "speed", "plan": name, "auto_vs_full": round(ratio, 3), "bound": round(bound, 3),
        "of_bound": round(ratio / bound, 3), "auto_vs_full_clock": round(_ratio(times[FULL], times[name], 0), 3),
        "none_vs_full": round(_ratio(times[FULL], times[NONE], 1), 3),
        "none_bound": round(operations[FULL] / operations[NONE], 3),
        "full_step_s": round(median(cpu for _, cpu in times[FULL]), 3), "budget_mib": round(budget / 2**20, 1),
        "peak_mib": round(peak / 2**20, 1), **{part: as_text(choices) for part, choices in plan.items()},
        "rounds": len(times[name]),
    }  # fmt: skip


def _ratio(of: list[tuple[float, float]], to: list[tuple[float, float]], which: int) -> float:
    return median(a[which] / b[which] for a, b in zip(of, to, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    for row in measure(parser.parse_args().rounds):
        print(json.dumps(row, ensure_ascii=False), flush=True)


if __name__ == "__main__":
    main()
