"""A pipeline's step in seconds, for many cuts at once: the programs of its stages, with costs of runs of units.

A *run* is what a stage computes at a time; run r belongs to stage r % stages, and a stage of an interleaved pipeline
has several. Programs come from outside, as a training run has them (`dhp.step.schedule`); `dhp.step.timed` plays the
same for one graph of stages, shared devices included.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dhp.plan.cut.units import Numbers


class Work(NamedTuple):
    """One micro-batch through one run, forward or back."""

    run: int
    back: bool
    micro_batch: int


Program = tuple[Work, ...]
Programs = tuple[Program, ...]  # of each stage


def merged(programs: Programs) -> tuple[Work, ...]:
    """All programs in one order in which each finds what it needs. Raises ValueError for programs that wait for one
    another."""
    last = max(work.run for program in programs for work in program)
    left = [list(reversed(program)) for program in programs]
    done: set[Work] = set()
    order: list[Work] = []
    while any(left):
        before = len(order)
        for program in left:
            while program and done.issuperset(_needs(program[-1], last)):
                done.add(program[-1])
                order.append(program.pop())
        if len(order) == before:
            raise ValueError(f"the programs wait for one another: {[str(p[-1]) for p in left if p]}")
    return tuple(order)


def _needs(work: Work, last: int) -> list[Work]:
    run, back, micro_batch = work
    if not back:
        return [Work(run - 1, False, micro_batch)] if run else []
    return [Work(run, False, micro_batch), *([Work(run + 1, True, micro_batch)] if run < last else [])]


def in_flight(program: Program) -> int:
    """The most micro-batches that a stage holds at once, each of its runs counted."""
    held = most = 0
    for work in program:
        held += -1 if work.back else 1
        most = max(most, held)
    return most


@dataclass(frozen=True)
class Costs:
    """Seconds of K cuts into R runs. forward, backward: [R, K] of one micro-batch; hop: [R - 1, K] of a hand-over;
    back: [R, K], whether a backward visits the run: if not, its stage never waits for one."""

    forward: Numbers
    backward: Numbers
    hop: Numbers
    back: NDArray[np.bool_]


_AT_ONCE = 2048  # cuts whose times of all actions fit into a core's cache


def simulate(order: Sequence[Work], stages: int, costs: Costs) -> Numbers:
    """Seconds of a step of each of the K cuts: each stage takes its next work as soon as it is free and what it needs
    has arrived. order: of `merged`."""
    cuts = costs.forward.shape[1]
    parts = [slice(first, first + _AT_ONCE) for first in range(0, cuts, _AT_ONCE)]
    found = [
        _simulate(order, stages, costs.forward[:, p], costs.backward[:, p], costs.hop[:, p], costs.back[:, p])
        for p in parts
    ]
    return np.concatenate(found) if found else np.zeros(0)


def _simulate(
    order: Sequence[Work], stages: int, forward: Numbers, backward: Numbers, hop: Numbers, back: NDArray[np.bool_]
) -> Numbers:
    runs, cuts = forward.shape
    free = [np.zeros(cuts)] * stages
    ends: dict[Work, Numbers] = {}
    # A run that no backward visits takes no time for it, and waits for nothing.
    backward = np.where(back, backward, 0.0)
    hop_back = np.where(back[:-1], hop, -np.inf)
    for work in order:
        run, is_back, micro_batch = work
        start, before = free[run % stages], run + 1 if is_back else run - 1
        if 0 <= before < runs:
            arrives = ends.pop(Work(before, is_back, micro_batch))
            arrives += hop_back[run] if is_back else hop[before]
            start = np.maximum(start, arrives, out=arrives)
        end = start + (backward if is_back else forward)[run]
        free[run % stages] = end
        ends[work] = end.copy()
    return np.max(free, axis=0)
