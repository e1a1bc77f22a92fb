"""The programs of a pipeline's stages, as the search for cuts plays them: those that a run submits."""

from __future__ import annotations

from dhp.config.ranges import SEQUENTIAL
from dhp.core.axes import Degrees
from dhp.core.graph import HIDDEN_STATES, Edge, Node, StageGraph, StageSpec
from dhp.planner.partition.simulate import Program, Programs, Work
from dhp.step.schedule import Action, Backward, make_programs, make_schedule


def pipeline_programs(kind: str, stages: int, chunks: int, micro_batches: int) -> Programs:
    """What each of these stages does in a step under `training.schedule` = kind, run r being chunk r // stages of stage
    r % stages. Raises ConfigError where an interleaved schedule has no whole groups of micro-batches."""
    graph = _pipeline(stages, chunks)
    if kind == SEQUENTIAL:
        schedule = make_schedule(kind, graph, micro_batches)
        own = [[action for action in schedule if action.node.stage == stage.name] for stage in graph.stages]
    else:
        programs = make_programs(kind, graph, micro_batches)
        own = [programs[stage.name] for stage in graph.stages]
    return tuple(_program(actions, at, stages) for at, actions in enumerate(own))


def _program(actions: list[Action], stage: int, stages: int) -> Program:
    return tuple(
        Work(action.node.chunk * stages + stage, isinstance(action, Backward), action.micro_batch) for action in actions
    )


def _pipeline(stages: int, chunks: int) -> StageGraph:
    """Stages of one part, a layer a run, each on a device of its own."""
    specs = tuple(
        StageSpec(
            f"text.{at}",
            "text",
            tuple(range(chunk * stages + at, chunk * stages + at + 1) for chunk in range(chunks)),
            Degrees(),
            True,
            range(at, at + 1),
        )
        for at in range(stages)
    )
    nodes = [Node(spec.name, chunk) for chunk in range(chunks) for spec in specs]
    edges = tuple(Edge(one, other, (HIDDEN_STATES,), True) for one, other in zip(nodes, nodes[1:]))
    return StageGraph(specs, edges)
