"""Chains of two devices in a real run, an actor for each rank on one thread: wall time of a step beside its replay.

Two devices are all that two cores can run at once. The replay has the CPU seconds of the same passes in this process,
and those of each device's updates behind them.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import ray
import torch

from dhp.cluster.cluster import Cluster
from dhp.cluster.watch import wait_all
from dhp.core.axes import Degrees
from dhp.core.batch import Batch, StepData
from dhp.engine.encoder import EncoderEngine
from dhp.engine.settings import StageSettings
from dhp.engine.text import TextEngine
from dhp.planner.partition.problem import PartitionProblem
from dhp.step.stages import make_stages
from dhp.trainer.plan import RunPlan
from dhp.trainer.programs import pipeline_programs
from dhp.trainer.settings import stage_settings
from experiments.layouts.ours import LOCAL, TIMEOUT_S, _layout, _train
from experiments.pair import TEXT, VISION, as_batch, join_alone, keep_freed_memory
from experiments.partition.chain import SCHEDULE, STEPS, Chain, plan_chain, stages_of
from experiments.partition.replay import SHAPE, Shape, cuts_of, measure_units
from experiments.recompute.work import deal, make_model, make_samples

MICRO_BATCHES = 8


class _OnItsCore:
    """A rank that works on the core of its device, as ranks of a GPU do: actors of one device take turns."""

    def __init__(self, settings: StageSettings):
        cores = sorted(os.sched_getaffinity(0))
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), {cores[min(settings.spec.devices) % len(cores)]})
        super().__init__(settings)  # type: ignore[call-arg]  # of the engine behind it


class _Encoder(_OnItsCore, EncoderEngine):
    """Of a tower."""


class _Text(_OnItsCore, TextEngine):
    """Of a decoder."""


ENGINES = {VISION: _Encoder, TEXT: _Text}


def walls(rounds: int, shape: Shape = SHAPE, steps: int = 4) -> Iterator[dict[str, Any]]:
    """A row for each cut that a method finds. steps: that count, of each round."""
    torch.set_num_threads(1)
    keep_freed_memory()
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), shape.tower, shape.decoder, shape.decoder_layers, shape.tower_layers)
        data = deal(model, Degrees(), Degrees(), make_samples(MICRO_BATCHES, shape.side, shape.words), MICRO_BATCHES)
        with join_alone():
            units = measure_units(model, shape, "", as_batch(data))
        problem = PartitionProblem(units, pipeline_programs(SCHEDULE, 2, 1, MICRO_BATCHES))
        found = {method: cuts for method, cuts in cuts_of(problem).items() if method in ("parameters", "exact")}
        plans = {method: plan_chain(model, stages_of(units, cuts), MICRO_BATCHES) for method, cuts in found.items()}
        replayed: dict[str, list[float]] = {method: [] for method in plans}
        taken: dict[str, list[float]] = {method: [] for method in plans}
        for _ in range(rounds):
            for method, plan in plans.items():
                with join_alone():
                    replayed[method] += _replays(plan, as_batch(data), steps)
                taken[method] += run_plan(plan, data, steps)
    for method, plan in plans.items():
        wall, replay = median(taken[method]), median(replayed[method])
        yield {
            "question": "wall", "stages": 2, "micro_batches": MICRO_BATCHES, "method": method,
            "devices": [[s.name for s in plan.graph.stages if d in s.devices] for d in (0, 1)],
            "wall_s": round(wall, 4), "replay_s": round(replay, 4), "wall_to_replay": round(wall / replay, 4),
            "steps": len(taken[method]), "rounds": rounds,
        }  # fmt: skip


def _replays(plan: RunPlan, batch: Batch, steps: int) -> list[float]:
    """Of each step that counts, with the updates of the device that takes longest over them."""
    chain = Chain(plan, MICRO_BATCHES)
    found = []
    for _ in range(steps + 1):
        seconds, _ = chain.step(batch)
        updates = [
            sum(chain.others.get(stage.name, 0.0) for stage in plan.graph.stages if device in stage.devices)
            for device in range(plan.graph.device_count())
        ]
        found.append(chain.replay_alike(seconds) + max(updates))
    return found[1:]


def run_plan(plan: RunPlan, data: StepData, steps: int) -> list[float]:
    """Wall seconds of each step that counts. As in a run, the next step is submitted while one runs."""
    graph = plan.graph
    with tempfile.TemporaryDirectory() as folder, Cluster(_layout(graph, folder, LOCAL)) as cluster:
        for stage in graph.stages:
            settings = stage_settings(plan.config, graph, stage, "cpu", STEPS, rules=plan.rules)
            cluster.groups[stage.name].start(ENGINES[stage.part], settings)
        wait_all([w for group in cluster.groups.values() for w in group.take_watched()], TIMEOUT_S)
        stages = make_stages(graph, cluster.groups)
        seconds, _ = _train(graph, stages, as_batch(data, ray.put), steps, MICRO_BATCHES)
    return list(seconds)
