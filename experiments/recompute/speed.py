"""Seconds of a step: everything recomputed, nothing, and what the planner makes of half of the memory between."""

from __future__ import annotations

import ctypes
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from dhp.plan.count.costs import Plan, StageCosts, predicted_bytes
from dhp.plan.recompute.best_plan import best_plan
from dhp.plan.recompute.planner import Planner, as_text
from experiments.recompute.layout import Layout, Run, in_this_process
from experiments.recompute.work import deal, make_model, make_samples

TOWER, DECODER, LAYERS = 512, 640, 8
SAMPLES, SIDE, WORDS = 1, 32, 256
TRIES = 5  # corrections of a plan, at most
FULL, NONE, WHOLE, SELECTED = "full", "none", "auto, whole layers", "auto, selected operations"


def measure(rounds: int) -> Iterator[dict[str, Any]]:
    """A row for whole layers and one for selected operations: ratios are medians over interleaved rounds."""
    torch.set_num_threads(1)  # so that this process's seconds of CPU are those of the work
    _keep_freed_memory()
    layout = Layout()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), TOWER, DECODER, LAYERS)
        with in_this_process(layout, model) as run:
            run.take(deal(model, layout.vision, layout.text, make_samples(SAMPLES, SIDE, WORDS), 1))
            costs = _measure_costs(run)
            budget = predicted_bytes(costs, _half(run), run.arrangement)
            plans = _plan(run, costs, budget)
            operations = {name: _count_operations(run, plan) for name, plan in plans.items()}
            times = _time(run, plans, rounds)
            peaks = {name: _peak(run, plan) for name, plan in plans.items()}
    for name in (WHOLE, SELECTED):
        yield _row(name, plans[name], budget, peaks[name], operations, times)


def _keep_freed_memory() -> None:
    """As allocators of GPUs do: else each large tensor costs the kernel's time for new pages, and more are kept with
    less recomputing. For glibc."""
    library = ctypes.CDLL(None)
    library.mallopt(-4, 0)  # M_MMAP_MAX: no mapping for a tensor
    library.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: nothing goes back


def _measure_costs(run: Run) -> dict[str, StageCosts]:
    """The planner's own measurements, without a budget."""
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
        FULL: everything,
        NONE: run.everything("none"),
        WHOLE: best_plan(whole, everything, auto, run.arrangement, budget),
        SELECTED: planner.asked,
    }


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
    """Of matrix products and attention in a step."""
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
        "mode": "speed",
        "plan": name,
        "auto_vs_full": round(ratio, 3),
        "bound": round(bound, 3),
        "of_bound": round(ratio / bound, 3),
        "auto_vs_full_clock": round(_ratio(times[FULL], times[name], 0), 3),
        "none_vs_full": round(_ratio(times[FULL], times[NONE], 1), 3),
        "none_bound": round(operations[FULL] / operations[NONE], 3),
        "full_step_s": round(median(cpu for _, cpu in times[FULL]), 3),
        "budget_mib": round(budget / 2**20, 1),
        "peak_mib": round(peak / 2**20, 1),
        **{part: as_text(choices) for part, choices in plan.items()},
        "rounds": len(times[name]),
    }


def _ratio(of: list[tuple[float, float]], to: list[tuple[float, float]], which: int) -> float:
    return median(a[which] / b[which] for a, b in zip(of, to, strict=True))
