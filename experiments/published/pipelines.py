"""A pipeline's step whose micro-batches differ, and cuts of a chain of layers into stages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dhp.plan.cut.simulate import Task, merged, pipeline_programs
from dhp.plan.cut.units import Numbers


def pipeline_seconds(forward: Numbers, backward: Numbers, hop: Numbers) -> Numbers:
    """Of 1F1B, by replica. forward, backward: [stages, micro-batches, replicas] seconds; hop: of a hand-over,
    [micro-batches, replicas]."""
    stages, micro_batches, replicas = forward.shape
    free = np.zeros((stages, replicas))
    ends: dict[Task, Numbers] = {}
    for work in merged(pipeline_programs("1f1b", stages, 1, micro_batches)):
        run, back, number = work
        before = run + 1 if back else run - 1
        start = free[run]
        if 0 <= before < stages:
            start = np.maximum(start, ends.pop(Task(before, back, number)) + hop[number])
        free[run] = ends[work] = start + (backward if back else forward)[run, number]
    return np.asarray(free.max(axis=0))


def stage_layers(cut: Sequence[int], tower: int) -> list[tuple[int, int]]:
    """Of each stage, its layers of the tower and of the decoder."""
    found, left = [], tower
    for layers in cut:
        own = min(layers, left)
        found.append((own, layers - own))
        left -= own
    return found


def least_slowest(seconds: Sequence[float], stages: int) -> list[int]:
    """Layers a stage of the cut whose slowest stage is the fastest, by the seconds of each layer."""
    ends = np.concatenate([[0.0], np.cumsum(seconds)])
    count = len(seconds)
    best = np.full((stages + 1, count + 1), np.inf)
    best[0, 0] = 0.0
    first = np.zeros((stages + 1, count + 1), dtype=int)
    for stage in range(1, stages + 1):
        for end in range(stage, count + 1):
            slowest = np.maximum(best[stage - 1, :end], ends[end] - ends[:end])
            first[stage, end] = int(slowest.argmin())
            best[stage, end] = slowest.min()
    cut, end = [], count
    for stage in range(stages, 0, -1):
        cut.append(int(end - first[stage, end]))
        end = int(first[stage, end])
    return cut[::-1]
