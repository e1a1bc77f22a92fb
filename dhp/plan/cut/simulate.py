"""Simulates a pipeline's programs in seconds, for many cuts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dhp.config.ranges import SEQUENTIAL
from dhp.core.axes import Degrees
from dhp.core.graph import HIDDEN_STATES, Edge, Node, StageGraph, StageSpec
from dhp.plan.cut.units import Numbers
from dhp.step.schedule import Action, Backward, make_programs, make_schedule


class Task(NamedTuple):
    """One micro-batch through one run, forward or back."""

    run: int
    back: bool
    micro_batch: int


Program = tuple[Task, ...]
Programs = tuple[Program, ...]  # of each stage


def merged(programs: Programs) -> tuple[Task, ...]:
    """All programs in one order in which each finds what it needs. Raises ValueError for programs that wait for one
    another."""
    last = max(work.run for program in programs for work in program)
    left = [list(reversed(program)) for program in programs]
    done: set[Task] = set()
    order: list[Task] = []
    while any(left):
        before = len(order)
        for program in left:
            while program and done.issuperset(_needs(program[-1], last)):
                done.add(program[-1])
                order.append(program.pop())
        if len(order) == before:
            raise ValueError(f"the programs wait for one another: {[str(p[-1]) for p in left if p]}")
    return tuple(order)


def _needs(work: Task, last: int) -> list[Task]:
    run, back, micro_batch = work
    if not back:
        return [Task(run - 1, False, micro_batch)] if run else []
    return [Task(run, False, micro_batch), *([Task(run + 1, True, micro_batch)] if run < last else [])]


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


def simulate(order: Sequence[Task], stages: int, costs: Costs) -> Numbers:
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
    order: Sequence[Task], stages: int, forward: Numbers, backward: Numbers, hop: Numbers, back: NDArray[np.bool_]
) -> Numbers:
    runs, cuts = forward.shape
    free = [np.zeros(cuts)] * stages
    ends: dict[Task, Numbers] = {}
    # A run that no backward visits takes no time for it, and waits for nothing.
    backward = np.where(back, backward, 0.0)
    hop_back = np.where(back[:-1], hop, -np.inf)
    for work in order:
        run, is_back, micro_batch = work
        start, before = free[run % stages], run + 1 if is_back else run - 1
        if 0 <= before < runs:
            arrives = ends.pop(Task(before, is_back, micro_batch))
            arrives += hop_back[run] if is_back else hop[before]
            start = np.maximum(start, arrives, out=arrives)
        end = start + (backward if is_back else forward)[run]
        free[run % stages] = end
        ends[work] = end.copy()
    return np.max(free, axis=0)


def pipeline_programs(kind: str, stages: int, chunks: int, micro_batches: int) -> Programs:
    """What each of these stages does in a step under `training.schedule` = kind, run r being chunk r // stages of stage
    r % stages. Raises ConfigError where an interleaved schedule has no whole groups of micro-batches."""
    graph = StageGraph(*_pipeline("text", stages, chunks))
    own = _actions(kind, graph, micro_batches)
    return tuple(_program(own[stage.name], at, stages) for at, stage in enumerate(graph.stages))


def chain_programs(kind: str, tower: int, stages: int, micro_batches: int) -> Programs:
    """The same of a tower's stages with a decoder's behind them, where the tower's last and the decoder's first are one
    run, which does what the decoder's does."""
    graph = chain_graph(tower, stages)
    actions = _actions(kind, graph, micro_batches)
    names = [stage.name for at, stage in enumerate(graph.stages) if at != tower - 1]
    return tuple(_program(actions[name], at, len(names)) for at, name in enumerate(names))


def chain_graph(tower: int, stages: int) -> StageGraph:
    """A tower's stages, a layer each, with a decoder's behind them."""
    (before, own), (behind, others) = _pipeline("vision", tower, 1), _pipeline("text", stages, 1)
    border = Edge(Node(before[-1].name), Node(behind[0].name), (HIDDEN_STATES,), True)
    return StageGraph((*before, *behind), (*own, border, *others))


def _actions(kind: str, graph: StageGraph, micro_batches: int) -> dict[str, list[Action]]:
    if kind != SEQUENTIAL:
        return make_programs(kind, graph, micro_batches)
    schedule = make_schedule(kind, graph, micro_batches)
    return {stage.name: [action for action in schedule if action.node.stage == stage.name] for stage in graph.stages}


def _program(actions: list[Action], stage: int, stages: int) -> Program:
    return tuple(
        Task(action.node.chunk * stages + stage, isinstance(action, Backward), action.micro_batch) for action in actions
    )


def _pipeline(part: str, stages: int, chunks: int) -> tuple[tuple[StageSpec, ...], tuple[Edge, ...]]:
    """Stages of one part, a layer a run, each on a device of its own, and the edges between them."""
    specs = tuple(
        StageSpec(
            f"{part}.{at}",
            part,
            tuple(range(chunk * stages + at, chunk * stages + at + 1) for chunk in range(chunks)),
            Degrees(),
            True,
            range(at, at + 1),
        )
        for at in range(stages)
    )
    nodes = [Node(spec.name, chunk) for chunk in range(chunks) for spec in specs]
    return specs, tuple(Edge(one, other, (HIDDEN_STATES,), True) for one, other in zip(nodes, nodes[1:]))
