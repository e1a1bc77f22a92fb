"""The programs of a pipeline's stages, as the search for cuts plays them."""

from __future__ import annotations

from dhp.config.ranges import SEQUENTIAL
from dhp.core.axes import Degrees
from dhp.core.graph import HIDDEN_STATES, Edge, Node, StageGraph, StageSpec
from dhp.plan.cut.simulate import Program, Programs, Work
from dhp.step.schedule import Action, Backward, make_programs, make_schedule


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
    """What each stage does, by name."""
    if kind != SEQUENTIAL:
        return make_programs(kind, graph, micro_batches)
    schedule = make_schedule(kind, graph, micro_batches)
    return {stage.name: [action for action in schedule if action.node.stage == stage.name] for stage in graph.stages}


def _program(actions: list[Action], stage: int, stages: int) -> Program:
    return tuple(
        Work(action.node.chunk * stages + stage, isinstance(action, Backward), action.micro_batch) for action in actions
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
